//! The part of a crash report in the run folder that a signal handler can write: nothing here allocates or
//! waits for a lock.

use std::ffi::{c_int, c_void};
use std::fmt::{self, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::text::Text;
use super::words::{self, BATCH, TEXT};
use crate::clock;
use crate::facts;
use crate::position::{self, Position};

/// Maximum length of a path in bytes.
const PATH: usize = libc::PATH_MAX as usize + 256;

/// Maximum number of recorded calls of a thread, innermost first.
const FRAMES: usize = 128;

/// Maximum number of folders of one rank.
const MOST: u64 = 1000;

/// The location of the program in memory: its first address, the address after its end, and the base of
/// addresses in its file, which is 0 if it is linked for a fixed address.
static PROGRAM: [AtomicUsize; 3] = [const { AtomicUsize::new(0) }; 3];

/// The crash that is being written.
pub(super) static REPORT: Mutex<Report> = Mutex::new(Report::new());

/// The contents of a crash report, and its place.
pub(super) struct Report {
    folder: Text<PATH>,
    text: Text<4096>,
    frames: [usize; FRAMES],
    count: usize,
    /// True if the first frame is the place of the fault, rather than a return address.
    is_at_fault: bool,
    /// The rank, if known.
    position: Option<Arc<Position>>,
}

impl Report {
    const fn new() -> Self {
        Report {
            folder: Text::new(),
            text: Text::new(),
            frames: [0; FRAMES],
            count: 0,
            is_at_fault: false,
            position: None,
        }
    }

    /// Begins the report of a crash of a thread of `rank`: creates its folder, and writes the facts available
    /// at once. Adds the lines `more`. Returns `false` if there is no such folder, as outside of a run.
    pub(super) fn begin(&mut self, rank: Option<usize>, what: fmt::Arguments<'_>, more: &[u8]) -> bool {
        let position = position::of(rank);
        self.count = 0;
        let made = position.clone().or_else(position::any).is_some_and(|place| {
            let is_made = self.make_folder(&place, position.is_some());
            std::mem::forget(place);
            is_made
        });
        // Dropping it could make the signal handler free memory.
        std::mem::forget(std::mem::replace(&mut self.position, position));
        if !made {
            return false;
        }
        self.text.truncate(0);
        // The only possible error is lack of room.
        let _ = self.write_header(rank, what);
        self.append(TEXT);
        if !more.is_empty() {
            self.append_bytes(TEXT, more.trim_ascii_end());
            self.append_bytes(TEXT, b"\n");
        }
        self.text.truncate(0);
        if self.write_batch().is_ok() {
            // A later panic may come in a later micro-batch.
            let descriptor = self.open(BATCH, libc::O_TRUNC);
            write_and_close(descriptor, self.text.bytes());
        }
        true
    }

    /// The folder of the crash.
    pub(super) fn folder(&self) -> &[u8] {
        self.folder.bytes()
    }

    /// Takes the calls of the thread, whether the first of them is the place of the fault, and the rank.
    pub(super) fn take(&mut self) -> (Vec<usize>, bool, Option<Arc<Position>>) {
        let frames = self.frames[..self.count].to_vec();
        self.count = 0;
        (frames, self.is_at_fault, self.position.take())
    }

    /// Records the calls of the calling thread, from the one at the address `fault` outwards, if that is one
    /// of them.
    pub(super) fn add_frames(&mut self, fault: usize) {
        // First the part that needs no unwinding: an overwritten stack may abort the unwinding.
        (self.frames[0], self.count, self.is_at_fault) = (fault, usize::from(fault != 0), fault != 0);
        self.text.truncate(0);
        let _ = self.text.write_str("\naddresses of the calls, the innermost first:\n");
        if self.is_at_fault {
            let _ = self.write_frame(0);
        }
        self.append(TEXT);
        let (frames, mut count, mut is_found) = (&mut self.frames, 0, false);
        let next = |frame: &backtrace::Frame| {
            let address = frame.ip() as usize;
            // Earlier calls are the handler's own.
            if fault != 0 && address == fault && !is_found {
                (count, is_found) = (0, true);
            }
            frames[count] = address;
            // The outermost call has no return address.
            count += usize::from(address != 0);
            count < FRAMES
        };
        // SAFETY: only resolving names must not run on several threads at the same time; this requests only
        // addresses.
        unsafe { backtrace::trace_unsynchronized(next) };
        (self.count, self.is_at_fault) = (count, is_found);
        for index in usize::from(is_found)..count {
            self.text.truncate(0);
            let _ = self.write_frame(index);
            self.append(TEXT);
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

    /// Creates the folder of a crash in the run of `place`. A rank has one folder per life; a number
    /// distinguishes it from those of earlier lives.
    fn make_folder(&mut self, place: &Position, is_known: bool) -> bool {
        self.folder.truncate(0);
        self.folder.push(&place.crashes);
        // It may already exist; any other problem shows below.
        let _ = self.make();
        let named = match is_known {
            true => write!(self.folder, "/rank_{}", place.rank),
            // SAFETY: has no preconditions.
            false => write!(self.folder, "/process_{}", unsafe { libc::getpid() }),
        };
        let (end, own) = (self.folder.len(), place.crash.load(Ordering::Relaxed));
        let is_again = is_known && own > 0;
        for number in if is_again { own..=own } else { 1..=MOST } {
            self.folder.truncate(end);
            let numbered = if number > 1 { write!(self.folder, "-{number}") } else { named };
            if numbered.is_err() {
                return false;
            }
            match self.make() {
                Ok(()) => {}
                Err(libc::EEXIST) if is_again => {}
                Err(libc::EEXIST) => continue,
                Err(_) => return false,
            }
            if is_known {
                place.crash.store(number, Ordering::Relaxed);
            }
            return true;
        }
        false
    }

    /// Creates `folder`.
    fn make(&mut self) -> Result<(), c_int> {
        // SAFETY: the path ends with a zero.
        match unsafe { libc::mkdir(self.folder.as_c_string(), 0o777) } {
            0 => Ok(()),
            // SAFETY: every thread has an error number.
            _ => Err(unsafe { *libc::__errno_location() }),
        }
    }

    fn write_header(&mut self, rank: Option<usize>, what: fmt::Arguments<'_>) -> fmt::Result {
        let text = &mut self.text;
        writeln!(text, "what     {what}")?;
        match &self.position {
            Some(position) => write_place(text, position)?,
            None => {
                text.write_str("rank     a thread of no rank; this process has been")?;
                position::write_to(text, rank)?;
                text.write_str("\n")?;
            }
        }
        let mut name = [0u8; 16];
        // SAFETY: the call writes up to 16 bytes, with a zero at their end.
        unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
        let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
        writeln!(text, "host     {}", facts::host())?;
        // SAFETY: has no preconditions.
        write!(text, "process  {}, thread ", unsafe { libc::getpid() })?;
        text.push(name);
        text.write_str("\ntime     ")?;
        clock::write_now(text)?;
        writeln!(text, "\nversion  {}", facts::version())
    }

    /// Writes the samples that the rank was working on, in machine-readable form.
    fn write_batch(&mut self) -> fmt::Result {
        let position = self.position.as_ref().ok_or(fmt::Error)?;
        let batch = position.micro_batch().ok_or(fmt::Error)?;
        words::write_batch(&mut self.text, position.rank, position.step(), batch)
    }

    /// Appends the text to a file of the folder.
    fn append(&mut self, name: &str) {
        let descriptor = self.open(name, libc::O_APPEND);
        write_and_close(descriptor, self.text.bytes());
    }

    fn append_bytes(&mut self, name: &str, bytes: &[u8]) {
        write_and_close(self.open(name, libc::O_APPEND), bytes);
    }

    fn open(&mut self, name: &str, how: c_int) -> c_int {
        let end = self.folder.len();
        self.folder.push(b"/");
        self.folder.push(name.as_bytes());
        let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_CLOEXEC | how;
        // SAFETY: the path ends with a zero.
        let descriptor = unsafe { libc::open(self.folder.as_c_string(), flags, 0o666) };
        self.folder.truncate(end);
        descriptor
    }
}

fn write_place<const N: usize>(text: &mut Text<N>, position: &Position) -> fmt::Result {
    let phase = position.phase();
    words::write_step(text, position.rank, position.step())?;
    write!(text, "phase    {phase}\nunit     ")?;
    let before = text.len();
    position.write_unit(text)?;
    match (text.len() == before, phase) {
        (true, _) => text.write_str("none was entered yet")?,
        (false, "forward" | "backward") => {}
        (false, _) => text.write_str(", the last one that was entered")?,
    }
    text.write_str("\ncall     ")?;
    let before = text.len();
    position.write_call(text)?;
    if text.len() == before {
        text.write_str("no collective yet")?;
    }
    text.write_str("\n")?;
    words::write_samples(text, position.micro_batch())
}

/// Writes to a descriptor and closes it; does nothing if it is negative.
fn write_and_close(descriptor: c_int, mut bytes: &[u8]) {
    if descriptor < 0 {
        return;
    }
    while !bytes.is_empty() {
        // SAFETY: the bytes outlive the call. If they cannot be written, nothing can be done.
        let written = unsafe { libc::write(descriptor, bytes.as_ptr().cast(), bytes.len()) };
        match usize::try_from(written) {
            Ok(written) if written > 0 => bytes = &bytes[written..],
            _ => break,
        }
    }
    // SAFETY: it was opened for this, and no one else has it.
    unsafe { libc::close(descriptor) };
}

/// Finds the location of the program in memory, and lets the system load what unwinding needs. Not for
/// handlers.
pub(super) fn prepare() {
    extern "C" fn first(info: *mut libc::dl_phdr_info, _size: usize, _data: *mut c_void) -> c_int {
        // SAFETY: the system passes a valid structure, with as many headers as it states.
        let (info, headers) = unsafe {
            let info = &*info;
            (info, std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)))
        };
        let loaded = || headers.iter().filter(|header| header.p_type == libc::PT_LOAD);
        let first = loaded().map(|header| header.p_vaddr).min().unwrap_or(0);
        let end = loaded().map(|header| header.p_vaddr + header.p_memsz).max().unwrap_or(0);
        // Addresses fit into a usize.
        let addresses = [first, end, 0].map(|address| (info.dlpi_addr + address) as usize);
        PROGRAM.iter().zip(addresses).for_each(|(place, address)| place.store(address, Ordering::Relaxed));
        // The first entry is the program; no others are needed.
        1
    }
    // SAFETY: `first` has the required signature and keeps nothing.
    unsafe { libc::dl_iterate_phdr(Some(first), std::ptr::null_mut()) };
    backtrace::trace(|_| false);
}
