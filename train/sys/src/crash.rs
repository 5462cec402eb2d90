//! Reports of fatal signals caused by the process itself, such as SIGSEGV: which rank, which step, and what
//! it was doing. The process then ends by that same signal, as it would without the report. Also the message
//! of a process that, on request, ends without saving.
//!
//! More than a line is written to the run folder, in `crash/rank_<r>`: for signals, panics and memory
//! exhaustion.
//!
//! - `refusal`: memory that the system has refused;
//! - `report`: the folder, and the part of the report that a signal handler can write;
//! - `helper`: a thread that adds the information that the handler cannot find out.
//!
//! The handler runs on the alternate stack that Rust gives to its threads, takes no lock that it would have
//! to wait for, and allocates nothing. The same holds for a panic that follows a failed allocation: naming
//! the calls of a backtrace allocates, and the standard library holds a lock meanwhile that a second failure
//! waits for.

mod helper;
mod refusal;
mod report;
mod text;
pub mod words;

use std::backtrace::Backtrace;
use std::ffi::{OsStr, c_int, c_void};
use std::fmt::{self, Write};
use std::mem::ManuallyDrop;
use std::os::unix::ffi::OsStrExt;
use std::panic;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, Once, OnceLock, PoisonError, TryLockError};
use std::thread;
use std::time::Duration;

use signal_hook::low_level;

use super::action::action_of;
use super::facts;
use super::launcher::{self, Word};
use super::output::{self, complain};
use super::position;
use refusal::{Reporting, failed_lately};
use report::REPORT;
use text::Text;

const SIGNALS: [(c_int, &str); 5] = [
    (libc::SIGSEGV, "SIGSEGV"),
    (libc::SIGBUS, "SIGBUS"),
    (libc::SIGILL, "SIGILL"),
    (libc::SIGFPE, "SIGFPE"),
    (libc::SIGABRT, "SIGABRT"),
];

/// The previous action of each signal: Rust's own handler reports stack overflows.
static BEFORE: [OnceLock<libc::sigaction>; SIGNALS.len()] = [const { OnceLock::new() }; SIGNALS.len()];

/// True once a handler has begun a report: the first signal is the cause.
static TOLD: AtomicBool = AtomicBool::new(false);

/// Maximum time for earlier lines to be written.
const EARLIER_LINES: Duration = Duration::from_millis(500);

/// Maximum time to wait for another report to finish, and for the helper to add names and the flight
/// recorder.
const TURN: Duration = Duration::from_millis(100);
const HELP: Duration = Duration::from_secs(5);

/// The line to report. Not on the stack, which may be small.
static LINE: Mutex<Line> = Mutex::new(Line { text: Text::new(), begin: 0 });

/// The table of [`write_holders`].
static HOLDERS: Mutex<Text<4096>> = Mutex::new(Text::new());

/// The exit code of a process that has run out of memory.
const EXHAUSTED: c_int = 1;

/// Records that the system has refused an allocation of `bytes`. The global allocator calls this before its
/// caller learns of the failure. If the thread is reporting a crash, the process ends here: continuing would
/// wait for a lock that the thread may hold. Allocates nothing and waits for no lock.
pub fn allocation_failed(bytes: usize) {
    refusal::note(bytes);
    if Reporting::is_here() {
        end_without_memory(bytes, format_args!("no memory to report a crash"));
    }
}

/// Ends this process after a failed request for `bytes`, and writes a report to the run folder. Allocates
/// nothing, and waits at most [`TURN`] for locks.
fn end_without_memory(bytes: usize, what: fmt::Arguments<'_>) -> ! {
    match TOLD.swap(true, Ordering::Relaxed) {
        // Another thread writes the report and ends the process.
        true => thread::sleep(HELP),
        false => {
            let rank = facts::rank_of_thread();
            let holders = write_holders(bytes);
            let holders = holders.as_ref().map_or(&[][..], |holders| holders.bytes());
            let mut report = within(TURN, &REPORT);
            let what = format_args!("{what}, after an allocation of {bytes} bytes failed");
            let is_kept = report.as_mut().is_some_and(|report| report.begin(rank, what, holders));
            if let Ok(mut line) = LINE.try_lock() {
                // The only possible error is lack of room.
                let _ = line.compose(&what, rank);
                line.send(report.as_ref().filter(|_| is_kept).map(|report| report.folder()));
            }
            if takes(libc::STDERR_FILENO) {
                put(libc::STDERR_FILENO, holders);
            }
        }
    }
    low_level::exit(EXHAUSTED)
}

/// Writes a table of the memory that each owner holds. Returns `None` while another thread writes it.
fn write_holders(bytes: usize) -> Option<MutexGuard<'static, Text<4096>>> {
    let mut holders = within(TURN, &HOLDERS)?;
    holders.truncate(0);
    // The only possible error is lack of room.
    let _ = facts::write_holders(&mut *holders, bytes);
    holders.ended_by_line();
    Some(holders)
}

/// Installs handlers that report signals which end this process because of a fault in it.
pub(super) fn tell_crashes() {
    for ((signal, _), before) in SIGNALS.iter().zip(&BEFORE) {
        let Some(action) = action_of(*signal) else { continue };
        if action.sa_sigaction == libc::SIG_IGN || before.set(action).is_err() {
            continue;
        }
        let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = on_signal;
        // SAFETY: all fields of the plain C structure may be zero.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = handler as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: `on_signal` is safe in a handler, see there, and has the signature of SA_SIGINFO.
        unsafe { libc::sigaction(*signal, &raw const action, ptr::null_mut()) };
    }
}

/// Everything here may be called at any moment: it writes to preallocated memory, and calls `mkdir`, `open`,
/// `write`, `close`, `nanosleep`, `poll`, `prctl`, `sigaction` and `raise`. Only after everything else has
/// been written does it unwind the stack.
extern "C" fn on_signal(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    if !TOLD.swap(true, Ordering::Relaxed) {
        // SAFETY: the system gives a handler with SA_SIGINFO valid structures.
        let info = unsafe { info.as_ref() };
        let failed = if signal == libc::SIGABRT { failed_lately() } else { None };
        tell(&What { signal, info, failed }, address_of_fault(context));
    }
    let before = |signal| {
        let index = SIGNALS.iter().position(|(known, _)| *known == signal);
        index.and_then(|index| BEFORE[index].get())
    };
    // The previous handler may abort. The stack for signals may be too small for a second one that has nothing to add.
    if let (true, Some(action)) = (signal != libc::SIGABRT, before(libc::SIGABRT)) {
        // SAFETY: the action was in place before `on_signal`.
        unsafe { libc::sigaction(libc::SIGABRT, action, ptr::null_mut()) };
    }
    if let Some(before) = before(signal) {
        pass_on(before, signal, info, context);
    }
    // SAFETY: sets the default action and sends the signal again, which is delivered when this returns
    // and ends the process, with its exit status and its core dump.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = libc::SIG_DFL;
        libc::sigaction(signal, &raw const action, ptr::null_mut());
        libc::raise(signal);
    }
}

/// Ends this process because `signal` has requested that a second time, and reports what is not saved. Like
/// everything here, it may be called at any moment.
pub(super) fn end_at_once(signal: c_int) -> ! {
    if !TOLD.swap(true, Ordering::Relaxed)
        && let Ok(mut line) = LINE.try_lock()
    {
        let Line { text, begin } = &mut *line;
        *begin = text.len() + 1;
        // The only possible error is lack of room.
        let name = low_level::signal_name(signal).unwrap_or("a signal");
        let letter = char::from(Word::Failure.letter());
        let _ = write!(text, "{letter}kiln: ended at once by a second {name}")
            .and_then(|()| position::write_unsaved_to(text));
        line.send(None);
    }
    // The exit code by which shells show the signal.
    low_level::exit(128 + signal)
}

/// Reports a signal, on standard error and in the run folder.
fn tell(what: &What<'_>, fault: usize) {
    let rank = facts::rank_of_thread();
    let holders = what.failed.and_then(write_holders);
    let holders = holders.as_ref().map_or(&[][..], |holders| holders.bytes());
    let mut report = within(TURN, &REPORT);
    let is_kept = report.as_mut().is_some_and(|report| report.begin(rank, format_args!("{what}"), holders));
    let report = report.filter(|_| is_kept);
    if let Ok(mut line) = LINE.try_lock() {
        // The only possible error is lack of room.
        let _ = line.compose(what, rank);
        line.send(report.as_ref().map(|report| report.folder()));
    }
    if let Some(mut report) = report {
        report.add_frames(fault);
        drop(report);
        helper::ask(HELP);
    }
}

/// Acquires the lock, if that is possible within about `limit`.
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

/// A signal, with its cause.
struct What<'a> {
    signal: c_int,
    info: Option<&'a libc::siginfo_t>,
    /// Size of a failed allocation that may be the cause, in bytes.
    failed: Option<usize>,
}

impl fmt::Display for What<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let What { signal, info, failed } = *self;
        f.write_str(SIGNALS.iter().find(|(known, _)| *known == signal).map_or("a signal", |(_, n)| n))?;
        if let Some(bytes) = failed {
            return write!(f, ", after an allocation of {bytes} bytes failed");
        }
        let Some(info) = info else { return Ok(()) };
        // SAFETY: codes above zero are those of the processor's faults, which have an address; codes of zero
        // and below mean that a process has sent the signal.
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

/// Returns the address of the instruction that a signal has interrupted; 0 if unknown.
fn address_of_fault(context: *mut c_void) -> usize {
    // SAFETY: the system gives a handler with SA_SIGINFO a structure of this type.
    let Some(context) = (unsafe { context.cast::<libc::ucontext_t>().as_ref() }) else { return 0 };
    #[cfg(target_arch = "x86_64")]
    let address = context.uc_mcontext.gregs[libc::REG_RIP as usize] as usize;
    #[cfg(target_arch = "aarch64")]
    let address = context.uc_mcontext.pc as usize;
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let address = {
        let _ = context;
        0
    };
    address
}

/// Makes panics of any thread write a report to the folder of the run that its rank belongs to, as [`keep`]
/// does.
pub(super) fn keep_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        helper::start();
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
            if helper::is_here() {
                return before(panic);
            }
            let place = panic.location().map_or_else(String::new, |place| format!(" at {place}"));
            let text = panic.payload_as_str().unwrap_or("without a message");
            keep(&format!("a panic{place}: {text}"), |folder| {
                before(panic);
                if let Some(folder) = folder {
                    complain(&format!("what is known of this panic: {}", folder.display()));
                }
            });
        }));
    });
}

/// Writes a report to the run folder of the calling thread's rank, if there is one, when the thread cannot
/// continue because of `what`. `tell` informs people, once the folder exists.
pub fn keep(what: &str, tell: impl FnOnce(Option<&Path>)) {
    static ONE: Mutex<()> = Mutex::new(());
    let _reporting = Reporting::begin();
    // The holder may be this same thread, if even its report fails.
    let Some(_one) = within(2 * HELP, &ONE) else { return tell(None) };
    let (first, more) = what.split_once('\n').unwrap_or((what, ""));
    let folder = {
        let mut report = REPORT.lock().unwrap_or_else(PoisonError::into_inner);
        let is_kept = report.begin(facts::rank_of_thread(), format_args!("{first}"), more.as_bytes());
        is_kept.then(|| PathBuf::from(OsStr::from_bytes(report.folder())))
    };
    tell(folder.as_deref());
    if let Some(folder) = folder {
        // If it cannot be written, nothing can be done.
        let _ = helper::append(&folder, &format!("\nbacktrace:\n{}", Backtrace::force_capture()));
        helper::ask(HELP);
    }
}

/// Calls the previous handler.
fn pass_on(before: &libc::sigaction, signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    if [libc::SIG_DFL, libc::SIG_IGN].contains(&before.sa_sigaction) {
        return;
    }
    // SAFETY: the code that registered the handler provided a function of this signature, according to its
    // flags.
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

/// A line for standard error, preceded by a part for the launcher only, such as the letter of its message.
struct Line {
    text: Text<4096>,
    /// Index at which the line begins.
    begin: usize,
}

impl Line {
    fn compose(&mut self, what: &dyn fmt::Display, rank: Option<usize>) -> fmt::Result {
        let Line { text, begin } = self;
        if let Some(step) = position::of(rank).map(|position| ManuallyDrop::new(position).step())
            && step > 0
        {
            write!(text, "{}{step}\0", char::from(Word::Step.letter()))?;
        }
        *begin = text.len() + 1;
        write!(text, "{}kiln: {what}", char::from(Word::Failure.letter()))?;
        position::write_to(text, rank)
    }

    /// Sends the line, and for people the place of further information: `folder`.
    fn send(&mut self, folder: Option<&[u8]>) {
        // First to the launcher, which always reads. It compares the lives of a job, whose folders differ, so
        // it gets no folder.
        if let Some(pipe) = launcher::descriptor() {
            put(pipe, self.text.ended_by(0));
        }
        if let Some(folder) = folder {
            self.text.push(b"; what is known of it: ");
            self.text.push(folder);
        }
        // After the lines that another thread is writing, if possible.
        for _ in 0..EARLIER_LINES.as_millis() {
            if !output::complaints_wait() {
                break;
            }
            thread::sleep(Duration::from_millis(1));
        }
        if takes(libc::STDERR_FILENO) {
            let begin = self.begin;
            put(libc::STDERR_FILENO, &self.text.ended_by(b'\n')[begin..]);
        }
    }
}

/// Returns true if a line can be written to a descriptor at once: its reader may have stopped.
fn takes(descriptor: c_int) -> bool {
    let mut poll = libc::pollfd { fd: descriptor, events: libc::POLLOUT, revents: 0 };
    // SAFETY: the one structure outlives the call, which does not wait.
    unsafe { libc::poll(&raw mut poll, 1, 0) == 1 && poll.revents & libc::POLLOUT != 0 }
}

fn put(descriptor: c_int, bytes: &[u8]) {
    // SAFETY: the bytes outlive the call. If they cannot be written, nothing can be done.
    unsafe { libc::write(descriptor, bytes.as_ptr().cast(), bytes.len()) };
}

#[cfg(test)]
mod tests;
