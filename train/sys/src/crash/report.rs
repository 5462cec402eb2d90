//! Writes crash reports into the run folder. A signal handler writes a part, and a helper thread adds the rest.

use std::cell::Cell;
use std::ffi::{CStr, OsStr, c_int, c_void};
use std::fmt::{self, Write};
use std::fs::{self, File, OpenOptions};
use std::io::{self, PipeReader, PipeWriter, Read, Write as _};
use std::mem;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::fs::{Mode, OFlags, mkdir, open};
use rustix::io::Errno;

use crate::facts::facts;
use crate::launcher::Seen;
use crate::position::{self, Position};
use crate::words::{time_now, write_now};

thread_local! {
    static IS_REPORTING: Cell<bool> = const { Cell::new(false) };
}

pub(super) fn is_reporting() -> bool {
    IS_REPORTING.try_with(Cell::get).unwrap_or(false)
}

pub(super) struct Reporting(bool);

impl Reporting {
    pub(super) fn begin() -> Self {
        Reporting(IS_REPORTING.replace(true))
    }
}

impl Drop for Reporting {
    fn drop(&mut self) {
        IS_REPORTING.set(self.0);
    }
}

const TEXT: &str = "crash.txt";

/// Samples that the rank was working on.
const BATCH: &str = "batch.json";

const FLIGHT: &str = "flight.json";

const PATH: usize = libc::PATH_MAX as usize + 256;

const FRAMES: usize = 128;

const MOST: u64 = 1000;

/// Addresses of the program in memory: start, end, and load base (0 if linked for a fixed address).
static PROGRAM: [AtomicUsize; 3] = [const { AtomicUsize::new(0) }; 3];

/// Text of up to `N - 1` bytes in preallocated memory, for signal handlers. Further bytes are dropped.
pub(super) struct Text<const N: usize> {
    bytes: [u8; N],
    len: usize,
}

impl<const N: usize> Text<N> {
    pub(super) const fn new() -> Self {
        Text { bytes: [0; N], len: 0 }
    }

    fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Appends as many of `bytes` as fit; returns whether all fit.
    pub(super) fn push(&mut self, bytes: &[u8]) -> bool {
        // `ended_by` uses the last byte.
        let taken = bytes.len().min(N - 1 - self.len);
        self.bytes[self.len..self.len + taken].copy_from_slice(&bytes[..taken]);
        self.len += taken;
        taken == bytes.len()
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// Returns the text followed by the byte `last`, which always fits.
    pub(super) fn ended_by(&mut self, last: u8) -> &[u8] {
        self.bytes[self.len] = last;
        &self.bytes[..=self.len]
    }

    /// Ends the text with a line break, which replaces the last byte if the text is full.
    pub(super) fn end_line(&mut self) {
        self.truncate(N - 2);
        self.push(b"\n");
    }

    fn as_c_str(&mut self) -> &CStr {
        CStr::from_bytes_until_nul(self.ended_by(0)).unwrap_or_default()
    }
}

impl<const N: usize> Write for Text<N> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        if self.push(text.as_bytes()) { Ok(()) } else { Err(fmt::Error) }
    }
}

pub(super) static REPORT: Mutex<Report> = Mutex::new(Report {
    folder: Text::new(),
    text: Text::new(),
    frames: [0; FRAMES],
    count: 0,
    is_at_fault: false,
    position: None,
});

pub(super) struct Report {
    folder: Text<PATH>,
    text: Text<4096>,
    frames: [usize; FRAMES],
    count: usize,
    /// True if the first frame is the faulting instruction rather than a return address.
    is_at_fault: bool,
    position: Option<Arc<Position>>,
}

/// No method allocates or waits for a lock.
impl Report {
    /// Creates the folder of the report and writes the known facts, followed by `more`. Returns false if the folder
    /// cannot be created, for example outside of a run.
    pub(super) fn begin(&mut self, rank: Option<usize>, what: &dyn fmt::Display, more: &[u8]) -> bool {
        let position = position::of(rank);
        let place = position.clone().or_else(position::any);
        let is_made = place.as_ref().is_some_and(|place| self.make_folder(place, position.is_some()));
        self.count = 0;
        // Dropping either could make the signal handler free memory.
        mem::forget(place);
        mem::forget(mem::replace(&mut self.position, position));
        if !is_made {
            return false;
        }
        self.text.truncate(0);
        // Fails only if `text` is full.
        let _ = self.write_header(rank, what);
        self.append_text();
        if !more.is_empty() {
            write_file(&mut self.folder, TEXT, OFlags::APPEND, more.trim_ascii_end());
            write_file(&mut self.folder, TEXT, OFlags::APPEND, b"\n");
        }
        self.text.truncate(0);
        if let Some(position) = &self.position
            && write_batch(&mut self.text, position.rank, position.progress().seen()).is_ok()
        {
            // A later panic may belong to a later micro-batch, so the file is replaced.
            write_file(&mut self.folder, BATCH, OFlags::TRUNC, self.text.bytes());
        }
        true
    }

    pub(super) fn folder(&self) -> &[u8] {
        self.folder.bytes()
    }

    /// Records the calling thread's calls, starting at the address `fault` if it is among them.
    pub(super) fn add_frames(&mut self, fault: usize) {
        // Written before unwinding, which may abort on an overwritten stack.
        (self.frames[0], self.count, self.is_at_fault) = (fault, usize::from(fault != 0), fault != 0);
        self.text.truncate(0);
        let _ = self.text.write_str("\naddresses of the calls, the innermost first:\n");
        if self.is_at_fault {
            let _ = self.write_frame(0);
        }
        self.append_text();
        let (frames, mut count, mut is_found) = (&mut self.frames, 0, false);
        let next = |frame: &backtrace::Frame| {
            let address = frame.ip() as usize;
            // Earlier calls are the handler's.
            if fault != 0 && address == fault && !is_found {
                (count, is_found) = (0, true);
            }
            frames[count] = address;
            // The outermost call has no return address.
            count += usize::from(address != 0);
            count < FRAMES
        };
        // SAFETY: only resolving names needs the lock; this closure reads addresses.
        unsafe { backtrace::trace_unsynchronized(next) };
        (self.count, self.is_at_fault) = (count, is_found);
        for index in usize::from(is_found)..count {
            self.text.truncate(0);
            let _ = self.write_frame(index);
            self.append_text();
        }
    }

    fn write_frame(&mut self, index: usize) -> fmt::Result {
        let address = self.frames[index];
        let [first, end, base] = [0, 1, 2].map(|i| PROGRAM[i].load(Ordering::Relaxed));
        write!(self.text, "  {address:#018x}")?;
        if (first..end).contains(&address) {
            write!(self.text, " program+{:#x}", address - base)?;
        }
        self.text.write_str("\n")
    }

    /// Creates the folder of a crash in the run of `place`. Each restart of the rank gets its own folder, with a number
    /// in its name.
    fn make_folder(&mut self, place: &Position, is_known: bool) -> bool {
        self.folder.truncate(0);
        self.folder.push(&place.crashes);
        // If this fails for another reason than an existing folder, the next `make` fails too.
        let _ = self.make();
        let named = match is_known {
            true => write!(self.folder, "/rank_{}", place.rank),
            false => write!(self.folder, "/process_{}", std::process::id()),
        };
        let end = self.folder.len;
        let own = if is_known { place.crash.load(Ordering::Relaxed) } else { 0 };
        for number in own.max(1)..=MOST {
            self.folder.truncate(end);
            let numbered = if number > 1 { write!(self.folder, "-{number}") } else { named };
            if numbered.is_err() {
                return false;
            }
            match self.make() {
                Err(Errno::EXIST) if number != own => continue,
                Err(Errno::EXIST) | Ok(()) => {}
                Err(_) => return false,
            }
            if is_known {
                place.crash.store(number, Ordering::Relaxed);
            }
            return true;
        }
        false
    }

    fn make(&mut self) -> rustix::io::Result<()> {
        mkdir(self.folder.as_c_str(), Mode::from_raw_mode(0o777))
    }

    fn write_header(&mut self, rank: Option<usize>, what: &dyn fmt::Display) -> fmt::Result {
        let text = &mut self.text;
        writeln!(text, "what     {what}")?;
        match &self.position {
            Some(position) => write_position(text, position)?,
            None => {
                text.write_str("rank     a thread of no rank; this process has been")?;
                position::write_to(text, rank)?;
                text.write_str("\n")?;
            }
        }
        let mut name = [0u8; 16];
        // SAFETY: the call writes at most 16 bytes, including a final zero.
        unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
        let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
        let system = rustix::system::uname();
        writeln!(text, "host     {}", system.nodename().to_str().unwrap_or("unknown"))?;
        write!(text, "process  {}, thread ", std::process::id())?;
        text.push(name);
        text.write_str("\ntime     ")?;
        write_now(text)?;
        writeln!(text, "\nversion  {}", facts().version)
    }

    fn append_text(&mut self) {
        write_file(&mut self.folder, TEXT, OFlags::APPEND, self.text.bytes());
    }
}

fn write_file(folder: &mut Text<PATH>, name: &str, how: OFlags, bytes: &[u8]) {
    let end = folder.len;
    folder.push(b"/");
    folder.push(name.as_bytes());
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC | how;
    let file = open(folder.as_c_str(), flags, Mode::from_raw_mode(0o666));
    folder.truncate(end);
    let _ = file.map(|file| File::from(file).write_all(bytes));
}

fn write_position<const N: usize>(text: &mut Text<N>, position: &Position) -> fmt::Result {
    let (phase, seen) = (position.phase(), position.progress().seen());
    write_step(text, position.rank, seen.step)?;
    write!(text, "phase    {phase}\nmodule   ")?;
    let before = text.len;
    position.write_module(text)?;
    match (text.len == before, phase) {
        (true, _) => text.write_str("none was entered yet")?,
        (false, "forward" | "backward") => {}
        (false, _) => text.write_str(", the last one that was entered")?,
    }
    text.write_str("\ncall     ")?;
    let before = text.len;
    position.view.recorder().write_last_call(text)?;
    if text.len == before {
        text.write_str("no collective yet")?;
    }
    text.write_str("\n")?;
    write_samples(text, seen)
}

/// Step 0 means before the first step.
fn write_step(out: &mut dyn Write, rank: usize, step: u64) -> fmt::Result {
    let note = if step == 0 { ", before the first one of this start" } else { "" };
    writeln!(out, "rank     {rank}\nstep     {step}{note}")
}

fn write_samples(out: &mut dyn Write, seen: Seen) -> fmt::Result {
    match seen.micro_batch {
        None => writeln!(out, "batch    none was fetched yet"),
        Some((index, first, 1)) => {
            writeln!(out, "batch    micro-batch {index}, sample {first} of the global order")
        }
        Some((index, first, samples)) => {
            let last = first + samples - 1;
            writeln!(out, "batch    micro-batch {index}, samples {first} to {last} of the global order")
        }
    }
}

fn write_batch(out: &mut dyn Write, rank: usize, seen: Seen) -> fmt::Result {
    let (index, first, samples) = seen.micro_batch.ok_or(fmt::Error)?;
    write!(out, "{{\"rank\":{rank},\"step\":{},\"micro_batch\":{index},", seen.step)?;
    writeln!(out, "\"first_sample\":{first},\"last_sample\":{}}}", first + samples - 1)
}

/// Writes the report of a killed rank on the rank's behalf, into a new folder in `crashes`. Returns that folder. `log`
/// is the file with the rank's standard error, and `last_lines` are its last lines.
///
/// # Errors
///
/// Errors of the file system.
pub fn report_killed(
    crashes: &Path,
    (rank, pid): (usize, i32),
    seen: Seen,
    log: &Path,
    last_lines: &[String],
) -> io::Result<PathBuf> {
    fs::create_dir_all(crashes)?;
    let mut number = 1;
    let folder = loop {
        let name = if number == 1 { format!("rank_{rank}") } else { format!("rank_{rank}-{number}") };
        let folder = crashes.join(name);
        match fs::create_dir(&folder) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
            made => break made.map(|()| folder)?,
        }
    };
    let mut text =
        "what     SIGKILL (9), reported by its launcher: a killed rank cannot write a report\n".to_owned();
    let _ = write_step(&mut text, rank, seen.step);
    text.push_str("phase    unknown; see what the others were waiting for: kiln inspect flight RUN\n");
    text.push_str("module   unknown\n");
    let _ = write_samples(&mut text, seen);
    let _ = writeln!(text, "host     {}", rustix::system::uname().nodename().to_string_lossy());
    let _ = writeln!(text, "process  {pid}\ntime     {}", time_now());
    let _ = writeln!(text, "\nthe last lines of its standard error, which is in {}:", log.display());
    last_lines.iter().for_each(|line| _ = writeln!(text, "  {line}"));
    fs::write(folder.join(TEXT), text)?;
    let mut batch = String::new();
    if write_batch(&mut batch, rank, seen).is_ok() {
        fs::write(folder.join(BATCH), batch)?;
    }
    Ok(folder)
}

/// Name of the helper thread, which resolves names and requests the flight recorder after a crash. The crashed thread
/// waits for a limited time, because it may hold a lock that the helper needs.
const HELPER: &str = "kiln-crash";

const LOOK: Duration = Duration::from_millis(2);

static WAKE: OnceLock<PipeWriter> = OnceLock::new();

static ASKED: AtomicU64 = AtomicU64::new(0);
static DONE: AtomicU64 = AtomicU64::new(0);

/// Starts the helper. Without it, reports have addresses instead of names, and no flight recorder. Not
/// async-signal-safe.
pub(super) fn start_helper() {
    find_program();
    backtrace::trace(|_| false);
    if let Ok((wake, writer)) = io::pipe()
        && thread::Builder::new().name(HELPER.to_owned()).spawn(move || help(wake)).is_ok()
    {
        let _ = WAKE.set(writer);
    }
}

pub(super) fn is_helper() -> bool {
    thread::current().name() == Some(HELPER)
}

/// Lets the helper finish the report and waits up to `limit`. Async-signal-safe.
pub(super) fn ask_helper(limit: Duration) {
    let Some(wake) = WAKE.get() else { return };
    let asked = ASKED.fetch_add(1, Ordering::Relaxed) + 1;
    let _ = rustix::io::write(wake, b"!");
    for _ in 0..limit.as_millis() / LOOK.as_millis() {
        if DONE.load(Ordering::Acquire) >= asked {
            return;
        }
        thread::sleep(LOOK);
    }
}

fn help(mut wake: PipeReader) {
    while wake.read_exact(&mut [0]).is_ok() {
        let asked = ASKED.load(Ordering::Relaxed);
        let reporting = Reporting::begin();
        let (folder, frames, is_at_fault, position) = {
            let mut report = REPORT.lock().unwrap_or_else(PoisonError::into_inner);
            let folder = PathBuf::from(OsStr::from_bytes(report.folder()));
            let count = mem::take(&mut report.count);
            let frames = report.frames[..count].to_vec();
            (folder, frames, report.is_at_fault, report.position.take())
        };
        if !frames.is_empty() {
            let _ = append(&folder, &names_of(&frames, is_at_fault));
        }
        if let Some(position) = position {
            let _ = fs::write(folder.join(FLIGHT), (position.flight)());
        }
        drop(reporting);
        DONE.store(asked, Ordering::Release);
    }
}

pub(super) fn append(folder: &Path, text: &str) -> io::Result<()> {
    OpenOptions::new().append(true).open(folder.join(TEXT))?.write_all(text.as_bytes())
}

fn names_of(frames: &[usize], is_at_fault: bool) -> String {
    let mut text = String::from("\nbacktrace, the innermost call first:\n");
    for (index, address) in frames.iter().enumerate() {
        // A return address may belong to the next function.
        let within = if index == 0 && is_at_fault { *address } else { address.saturating_sub(1) };
        let mut names = Vec::new();
        backtrace::resolve(within as *mut _, |symbol| {
            names.push(symbol.name().map_or_else(|| format!("{address:#x}"), |name| format!("{name:#}")));
        });
        if names.is_empty() {
            names.push(format!("{address:#x}"));
        }
        names.iter().for_each(|name| text.push_str(&format!("{index:>4}: {name}\n")));
    }
    text
}

fn find_program() {
    extern "C" fn first(info: *mut libc::dl_phdr_info, _size: usize, _data: *mut c_void) -> c_int {
        // SAFETY: the system passes a valid structure with `dlpi_phnum` headers.
        let (info, headers) = unsafe {
            let info = &*info;
            (info, std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)))
        };
        let loaded = || headers.iter().filter(|header| header.p_type == libc::PT_LOAD);
        let first = loaded().map(|header| header.p_vaddr).min().unwrap_or(0);
        let end = loaded().map(|header| header.p_vaddr + header.p_memsz).max().unwrap_or(0);
        let addresses = [first, end, 0].map(|address| (info.dlpi_addr + address) as usize);
        PROGRAM.iter().zip(addresses).for_each(|(place, address)| place.store(address, Ordering::Relaxed));
        // The first entry is the program; stop there.
        1
    }
    // SAFETY: `first` has the required signature and keeps no reference.
    unsafe { libc::dl_iterate_phdr(Some(first), std::ptr::null_mut()) };
}
