//! What a process says when a signal of its own making ends it, such as SIGSEGV: which rank, which step, and
//! what it was doing. The process then ends by that same signal, as it would have without this. And what one
//! says that ends without a save because somebody has asked for that.
//!
//! The handler runs on the alternate stack that Rust gives to its threads, takes no lock that it would
//! have to wait for, and allocates nothing.

use std::ffi::{c_int, c_void};
use std::fmt::{self, Write};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};
use std::thread;
use std::time::Duration;

use signal_hook::low_level;

use super::action::action_of;
use super::launcher::{self, Word};
use super::output;
use super::position;

const SIGNALS: [(c_int, &str); 5] = [
    (libc::SIGSEGV, "SIGSEGV"),
    (libc::SIGBUS, "SIGBUS"),
    (libc::SIGILL, "SIGILL"),
    (libc::SIGFPE, "SIGFPE"),
    (libc::SIGABRT, "SIGABRT"),
];

/// What happened on each signal before: Rust's own handler tells of stacks that have overflowed.
static BEFORE: [OnceLock<libc::sigaction>; SIGNALS.len()] = [const { OnceLock::new() }; SIGNALS.len()];

/// Whether a handler has begun to say something: the first signal is the cause.
static TOLD: AtomicBool = AtomicBool::new(false);

/// How long lines that were there before may take to be written.
const EARLIER_LINES: Duration = Duration::from_millis(500);

/// What is said. Not on the stack, which may be small.
static TEXT: Mutex<Text> = Mutex::new(Text { bytes: [0; 1024], len: 0, begin: 0 });

/// Asks for the rank that the calling thread works for.
static RANK_OF_THREAD: OnceLock<fn() -> Option<usize>> = OnceLock::new();

/// From now on, signals that end this process because of a fault in it are told, with the rank that
/// `rank_of_thread` says.
pub(super) fn tell_crashes(rank_of_thread: fn() -> Option<usize>) {
    RANK_OF_THREAD.get_or_init(|| rank_of_thread);
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

/// Sends SIGSEGV to the calling thread: a fire drill.
pub fn raise_segv() {
    // SAFETY: without a handler this ends the process; with `on_signal` as well.
    unsafe { libc::raise(libc::SIGSEGV) };
}

/// Everything here may be called at any moment: it writes to memory that was set aside, and calls
/// `nanosleep`, `poll`, `write`, `sigaction` and `raise`.
extern "C" fn on_signal(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    if !TOLD.swap(true, Ordering::Relaxed)
        && let Ok(mut text) = TEXT.try_lock()
    {
        // The only error is that there is no more room.
        let _ = compose(&mut text, signal, info);
        text.send();
    }
    let index = SIGNALS.iter().position(|(known, _)| *known == signal);
    if let Some(before) = index.and_then(|index| BEFORE[index].get()) {
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

/// Ends this process because somebody has asked for that by `signal` a second time, and says what is not
/// saved. Like everything here, it may be called at any moment.
pub(super) fn end_at_once(signal: c_int) -> ! {
    if !TOLD.swap(true, Ordering::Relaxed)
        && let Ok(mut text) = TEXT.try_lock()
    {
        text.begin = text.len + 1;
        // The only error is that there is no more room.
        let name = low_level::signal_name(signal).unwrap_or("a signal");
        let letter = char::from(Word::Failure.letter());
        let _ = write!(text, "{letter}kiln: ended at once by a second {name}")
            .and_then(|()| position::write_unsaved_to(&mut *text));
        text.send();
    }
    // The exit code is the one by which shells show the signal.
    low_level::exit(128 + signal)
}

fn compose(text: &mut Text, signal: c_int, info: *mut libc::siginfo_t) -> fmt::Result {
    let rank = RANK_OF_THREAD.get().and_then(|rank_of_thread| rank_of_thread());
    if let Some(step) = position::step_of(rank) {
        write!(text, "{}{step}\0", char::from(Word::Step.letter()))?;
    }
    text.begin = text.len + 1;
    let name = SIGNALS.iter().find(|(known, _)| *known == signal).map_or("a signal", |(_, n)| n);
    write!(text, "{}kiln: {name}", char::from(Word::Failure.letter()))?;
    // SAFETY: the system gives a handler with SA_SIGINFO a valid structure. The codes above zero are those of
    // the processor's faults, which have an address; at zero and below, a process has sent the signal.
    unsafe {
        if let Some(info) = info.as_ref() {
            if info.si_code > 0 && signal != libc::SIGABRT {
                write!(text, " (address {:p})", info.si_addr())?;
            } else if info.si_pid() != libc::getpid() {
                write!(text, " (sent by process {})", info.si_pid())?;
            }
        }
    }
    position::write_to(text, rank)
}

/// Calls the handler that was there before.
fn pass_on(before: &libc::sigaction, signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    if [libc::SIG_DFL, libc::SIG_IGN].contains(&before.sa_sigaction) {
        return;
    }
    // SAFETY: whoever has registered it has given a function of this signature, by its flags.
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

/// A line for standard error, behind what only the launcher is told, such as the letter of the line.
struct Text {
    bytes: [u8; 1024],
    len: usize,
    /// Where the line begins.
    begin: usize,
}

impl Write for Text {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        // Room for a last byte.
        let room = self.bytes.len() - 1 - self.len;
        let taken = text.len().min(room);
        self.bytes[self.len..self.len + taken].copy_from_slice(&text.as_bytes()[..taken]);
        self.len += taken;
        if taken == text.len() { Ok(()) } else { Err(fmt::Error) }
    }
}

impl Text {
    fn send(&mut self) {
        // First to the launcher, which always reads.
        self.bytes[self.len] = 0;
        if let Some(pipe) = launcher::descriptor() {
            put(pipe, &self.bytes[..=self.len]);
        }
        self.bytes[self.len] = b'\n';
        // Behind the lines that another thread is writing, if it can.
        for _ in 0..EARLIER_LINES.as_millis() {
            if !output::complaints_wait() {
                break;
            }
            thread::sleep(Duration::from_millis(1));
        }
        if takes(libc::STDERR_FILENO) {
            put(libc::STDERR_FILENO, &self.bytes[self.begin..=self.len]);
        }
    }
}

/// Whether a line can be written to a descriptor at once: its reader may have stopped.
fn takes(descriptor: c_int) -> bool {
    let mut poll = libc::pollfd { fd: descriptor, events: libc::POLLOUT, revents: 0 };
    // SAFETY: the one structure is there for as long as the call takes, which does not wait.
    unsafe { libc::poll(&raw mut poll, 1, 0) == 1 && poll.revents & libc::POLLOUT != 0 }
}

fn put(descriptor: c_int, bytes: &[u8]) {
    // SAFETY: the bytes live as long as the call. Where they cannot be written, nothing can be done.
    unsafe { libc::write(descriptor, bytes.as_ptr().cast(), bytes.len()) };
}

#[cfg(test)]
mod tests {
    use std::hint::black_box;
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    use super::*;

    const OVERFLOWS: &str = "KILN_TEST_OVERFLOWS";

    fn recurse(depth: u64) -> u64 {
        if depth == u64::MAX {
            return 0;
        }
        let block = black_box([depth; 64]);
        recurse(black_box(depth + 1)) + block[0]
    }

    /// Not a test of its own: the one below starts it as a program.
    #[test]
    #[ignore = "a program for another test"]
    fn overflows() {
        if std::env::var_os(OVERFLOWS).is_some() {
            tell_crashes(|| None);
            recurse(0);
        }
    }

    #[test]
    fn a_stack_that_overflows_is_told_as_rust_does() {
        let mut program = Command::new(std::env::current_exe().unwrap());
        program.args(["--exact", "crash::tests::overflows", "--ignored", "--nocapture"]);
        let output = program.env(OVERFLOWS, "1").output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{said}");
        assert!(said.contains("kiln: SIGSEGV (address 0x"), "{said}");
        assert!(said.contains("has overflowed its stack"), "{said}");
        assert!(!said.contains("kiln: SIGABRT"), "the first signal is the cause: {said}");
    }
}
