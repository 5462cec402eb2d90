//! Reports fatal signals such as SIGSEGV, panics and memory exhaustion: a line on standard error and to the launcher,
//! and a report in the run folder, in `crash/rank_<r>` (see [`report`]). The process then ends by the same signal.
//!
//! The handler runs on the alternate signal stack, never waits for a lock without a limit, and does not allocate. A
//! panic after a failed allocation is handled likewise: a backtrace with names would allocate while the standard
//! library holds a lock, and a second failed allocation would wait for that lock.

mod report;

use std::backtrace::Backtrace;
use std::ffi::{OsStr, c_int, c_void};
use std::fmt::{self, Write};
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::panic;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, Once, OnceLock, PoisonError, TryLockError};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use signal_hook::low_level;

use super::action::{action_of, handle, interrupted_at};
use super::facts::facts;
use super::launcher::{self, Message};
use super::output::{self, eprint_line};
use super::position;
use report::{REPORT, Report, Reporting, Text};

pub use report::report_killed;

const SIGNALS: [(c_int, &str); 5] = [
    (libc::SIGSEGV, "SIGSEGV"),
    (libc::SIGBUS, "SIGBUS"),
    (libc::SIGILL, "SIGILL"),
    (libc::SIGFPE, "SIGFPE"),
    (libc::SIGABRT, "SIGABRT"),
];

/// Previous actions of the signals. Rust's own handler reports stack overflows.
static BEFORE: [OnceLock<libc::sigaction>; SIGNALS.len()] = [const { OnceLock::new() }; SIGNALS.len()];

/// Only the first signal or failed allocation is reported, because it is the cause.
static BEGUN: AtomicBool = AtomicBool::new(false);

const EARLIER_LINES: Duration = Duration::from_millis(500);

/// Time limits for another report to finish, and for the helper to add names and the flight recorder.
const TURN: Duration = Duration::from_millis(100);
const HELP: Duration = Duration::from_secs(5);

/// The line to report, starting with the letter of the launcher's message, and a table of memory by owner. Static,
/// because the signal stack may be small.
static TEXTS: Mutex<(Text<4096>, Text<4096>)> = Mutex::new((Text::new(), Text::new()));

const EXHAUSTED: c_int = 1;

/// Size of the last failed allocation in bytes, and its time in seconds since 1970; 0 before the first.
static REFUSED: AtomicUsize = AtomicUsize::new(0);
static REFUSED_AT: AtomicU64 = AtomicU64::new(0);

/// Number of seconds in which a panic is attributed to a failed allocation. Callers may handle such a failure.
const FOLLOWS: u64 = 10;

/// Records a failed allocation of `bytes`; the global allocator calls it. If the thread is reporting a crash, ends the
/// process, because the report could wait for a lock that its own thread holds. Does not allocate or block.
pub fn allocation_failed(bytes: usize) {
    REFUSED.store(bytes, Ordering::Relaxed);
    REFUSED_AT.store(now(), Ordering::Relaxed);
    if report::is_reporting() {
        end_without_memory(bytes, format_args!("no memory to report a crash"));
    }
}

fn failed_lately() -> Option<usize> {
    let at = REFUSED_AT.load(Ordering::Relaxed);
    (at > 0 && now().saturating_sub(at) <= FOLLOWS).then(|| REFUSED.load(Ordering::Relaxed))
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |now| now.as_secs().max(1))
}

/// Reports a failed allocation of `bytes` and ends the process. Does not allocate; waits at most [`TURN`] for a lock.
fn end_without_memory(bytes: usize, what: fmt::Arguments<'_>) -> ! {
    match BEGUN.swap(true, Ordering::Relaxed) {
        true => thread::sleep(HELP),
        false => drop(print_and_keep(&format_args!("{what}, {}", Refused(bytes)), Some(bytes))),
    }
    low_level::exit(EXHAUSTED)
}

struct Refused(usize);

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "after an allocation of {} bytes failed", self.0)
    }
}

/// Reports `what` on standard error, to the launcher, and in the run folder. Adds a table of memory by owner if an
/// allocation of `refused` bytes has failed. Returns the report in the run folder, if any. Called once per process.
fn print_and_keep(what: &dyn fmt::Display, refused: Option<usize>) -> Option<MutexGuard<'static, Report>> {
    let rank = (facts().rank_of_thread)();
    let mut texts = TEXTS.try_lock().ok()?;
    let (line, holders) = &mut *texts;
    if let Some(bytes) = refused {
        let _ = (facts().write_holders)(holders, bytes);
        holders.end_line();
    }
    let mut report = within(TURN, &REPORT);
    if !report.as_mut().is_some_and(|report| report.begin(rank, what, holders.bytes())) {
        report = None;
    }
    if let Some(position) = position::of(rank).map(ManuallyDrop::new)
        && position.step() > 0
        && let Some(pipe) = launcher::pipe()
    {
        let mut step = Text::<32>::new();
        let _ = write!(step, "{}{}\0", char::from(Message::Step as u8), position.step());
        let _ = rustix::io::write(pipe, step.bytes());
    }
    let _ = write!(line, "{}kiln: {what}", char::from(Message::Failure as u8))
        .and_then(|()| position::write_to(line, rank));
    send(line, report.as_ref().map(|report| report.folder()));
    print(holders.bytes());
    report
}

/// Sends a line to the launcher and to standard error, where the folder of the crash report is added.
fn send(line: &mut Text<4096>, folder: Option<&[u8]>) {
    // The launcher comes first, because it always reads. Its line omits the folder, because the launcher compares the
    // failures of restarts.
    if let Some(pipe) = launcher::pipe() {
        let _ = rustix::io::write(pipe, line.ended_by(0));
    }
    if let Some(folder) = folder {
        line.push(b"; crash report: ");
        line.push(folder);
    }
    for _ in 0..EARLIER_LINES.as_millis() {
        if !output::has_waiting_errors() {
            break;
        }
        thread::sleep(Duration::from_millis(1));
    }
    print(&line.ended_by(b'\n')[1..]);
}

fn print(bytes: &[u8]) {
    let stderr = io::stderr();
    let mut polled = [PollFd::from_borrowed_fd(stderr.as_fd(), PollFlags::OUT)];
    if poll(&mut polled, Some(&Timespec::default())) == Ok(1) && polled[0].revents().contains(PollFlags::OUT)
    {
        let _ = rustix::io::write(&stderr, bytes);
    }
}

pub(super) fn report_signals() {
    for ((signal, _), before) in SIGNALS.iter().zip(&BEFORE) {
        let Some(action) = action_of(*signal) else { continue };
        if action.sa_sigaction != libc::SIG_IGN && before.set(action).is_ok() {
            // SAFETY: `on_signal` is async-signal-safe; its comment says why.
            unsafe { handle(*signal, on_signal, libc::SA_ONSTACK) };
        }
    }
}

/// Handles a fatal signal. Writes only to preallocated memory, and calls only `mkdir`, `open`, `write`, `close`,
/// `nanosleep`, `poll`, `prctl`, `sigaction` and `raise`. Unwinds the stack last, because that may fail.
extern "C" fn on_signal(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    if !BEGUN.swap(true, Ordering::Relaxed) {
        // SAFETY: the system gives a handler with SA_SIGINFO valid structures.
        let info = unsafe { info.as_ref() };
        let refused = if signal == libc::SIGABRT { failed_lately() } else { None };
        if let Some(mut report) = print_and_keep(&What { signal, info, refused }, refused) {
            report.add_frames(interrupted_at(context));
            drop(report);
            report::ask_helper(HELP);
        }
    }
    let before = |signal| {
        let index = SIGNALS.iter().position(|(known, _)| *known == signal);
        index.and_then(|index| BEFORE[index].get())
    };
    // The previous handler may abort, and the signal stack may be too small for a nested SIGABRT handler.
    if let (true, Some(action)) = (signal != libc::SIGABRT, before(libc::SIGABRT)) {
        // SAFETY: the action was in place before `on_signal`.
        unsafe { libc::sigaction(libc::SIGABRT, action, ptr::null_mut()) };
    }
    if let Some(before) = before(signal) {
        pass_on(before, signal, info, context);
    }
    // SAFETY: restores the default action and sends the signal again, which ends the process when this handler returns.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        libc::raise(signal);
    }
}

fn pass_on(before: &libc::sigaction, signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    if [libc::SIG_DFL, libc::SIG_IGN].contains(&before.sa_sigaction) {
        return;
    }
    // SAFETY: the code that registered the handler provided a function of the signature that the flags declare.
    unsafe {
        if before.sa_flags & libc::SA_SIGINFO != 0 {
            type Handler = extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);
            std::mem::transmute::<usize, Handler>(before.sa_sigaction)(signal, info, context);
        } else {
            type Handler = extern "C" fn(c_int);
            std::mem::transmute::<usize, Handler>(before.sa_sigaction)(signal);
        }
    }
}

/// Ends this process because a second `signal` has asked it to stop, and reports the unsaved steps. Async-signal-safe.
pub(super) fn end_at_once(signal: c_int) -> ! {
    if !BEGUN.swap(true, Ordering::Relaxed)
        && let Ok(mut texts) = TEXTS.try_lock()
    {
        let line = &mut texts.0;
        let name = low_level::signal_name(signal).unwrap_or("a signal");
        let letter = char::from(Message::Failure as u8);
        let _ = write!(line, "{letter}kiln: ended at once by a second {name}")
            .and_then(|()| position::write_unsaved_to(line));
        send(line, None);
    }
    // Shells report a process that a signal ended with this exit code.
    low_level::exit(128 + signal)
}

fn within<T>(limit: Duration, lock: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    let attempt = |_| match lock.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => {
            thread::sleep(Duration::from_millis(1));
            None
        }
    };
    (0..limit.as_millis()).find_map(attempt)
}

struct What<'a> {
    signal: c_int,
    info: Option<&'a libc::siginfo_t>,
    refused: Option<usize>,
}

impl fmt::Display for What<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let What { signal, info, refused } = *self;
        f.write_str(SIGNALS.iter().find(|(known, _)| *known == signal).map_or("a signal", |(_, n)| n))?;
        if let Some(bytes) = refused {
            return write!(f, ", {}", Refused(bytes));
        }
        let Some(info) = info else { return Ok(()) };
        // SAFETY: faults of the processor have positive codes and an address; processes send signals with other codes.
        unsafe {
            if info.si_code > 0 && signal != libc::SIGABRT {
                write!(f, " (address {:p})", info.si_addr())?;
            } else if info.si_pid() != libc::getpid() {
                write!(f, " (sent by process {})", info.si_pid())?;
            }
        }
        Ok(())
    }
}

pub(super) fn keep_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        report::start_helper();
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |panic| {
            let _reporting = Reporting::begin();
            if let Some(bytes) = failed_lately() {
                let text = panic.payload_as_str().and_then(|text| text.lines().next()).unwrap_or_default();
                match panic.location() {
                    Some(place) => end_without_memory(bytes, format_args!("a panic at {place}: {text}")),
                    None => end_without_memory(bytes, format_args!("a panic: {text}")),
                }
            }
            if report::is_helper() {
                return before(panic);
            }
            let place = panic.location().map_or_else(String::new, |place| format!(" at {place}"));
            let text = panic.payload_as_str().unwrap_or("without a message");
            keep(&format!("a panic{place}: {text}"), |folder| {
                before(panic);
                if let Some(folder) = folder {
                    eprint_line(&format!("crash report: {}", folder.display()));
                }
            });
        }));
    });
}

/// Writes a report to the run folder of the calling thread's rank, if there is one: `what` stops the thread. Calls
/// `tell`, which informs the user, once the folder exists.
pub fn keep(what: &str, tell: impl FnOnce(Option<&Path>)) {
    static ONE: Mutex<()> = Mutex::new(());
    let _reporting = Reporting::begin();
    // This thread may hold the lock, if its own report fails.
    let Some(_one) = within(2 * HELP, &ONE) else { return tell(None) };
    let (first, more) = what.split_once('\n').unwrap_or((what, ""));
    let folder = {
        let mut report = REPORT.lock().unwrap_or_else(PoisonError::into_inner);
        let is_kept = report.begin((facts().rank_of_thread)(), &first, more.as_bytes());
        is_kept.then(|| PathBuf::from(OsStr::from_bytes(report.folder())))
    };
    tell(folder.as_deref());
    if let Some(folder) = folder {
        let _ = report::append(&folder, &format!("\nbacktrace:\n{}", Backtrace::force_capture()));
        report::ask_helper(HELP);
    }
}

#[cfg(test)]
mod tests;
