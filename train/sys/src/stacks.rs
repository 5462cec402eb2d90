//! Takes the call stacks of all threads of this process. A signal interrupts one thread after another, and its handler
//! records the addresses of the interrupted calls.

use std::ffi::{c_int, c_void};
use std::fs;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use nix::unistd::gettid;

use super::action::{action_of, handle, interrupted_at};

const MOST_CALLS: usize = 128;

/// Time limit for one thread's answer. A thread that blocks all signals never answers.
const PATIENCE: Duration = Duration::from_millis(50);

const PATIENCE_FOR_ALL: Duration = Duration::from_millis(700);

/// Id of the thread that should record its calls, or one of the constants below.
static ASKED: AtomicI32 = AtomicI32::new(NOBODY);
const NOBODY: i32 = 0;
const ANSWERING: i32 = -1;
const PREPARING: i32 = -2;

/// The recorded addresses and their number; valid once `ANSWERED` is true.
static CALLS: [AtomicUsize; MOST_CALLS] = [const { AtomicUsize::new(0) }; MOST_CALLS];
static COUNT: AtomicUsize = AtomicUsize::new(0);
static INTERRUPTED: AtomicUsize = AtomicUsize::new(0);
static ANSWERED: AtomicBool = AtomicBool::new(false);

static TAKING: Mutex<()> = Mutex::new(());

/// A thread and its call stack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThreadStack {
    /// Thread id, as numbered by the system.
    pub id: i32,
    /// Thread name, at most 15 bytes.
    pub name: String,
    /// Addresses in the active functions, innermost first, or the reason why they are unknown. All except the first are
    /// return addresses.
    pub calls: Result<Vec<usize>, &'static str>,
}

/// Returns the call stacks of all other threads of this process, in less than a second.
pub fn of_all_threads() -> Vec<ThreadStack> {
    let own = gettid().as_raw();
    let end = Instant::now() + PATIENCE_FOR_ALL;
    let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let mut ids: Vec<i32> = tasks.filter_map(|task| task.file_name().to_str()?.parse().ok()).collect();
    ids.sort_unstable();
    let taken = match TAKING.try_lock() {
        Err(TryLockError::WouldBlock) => Err("another request for call stacks is in progress"),
        // A poisoned lock is fine: it protects no data.
        taken => Ok(taken),
    };
    let signal = match &taken {
        Ok(_) => signal().ok_or("no signal is free to interrupt the threads with"),
        Err(why) => Err(*why),
    };
    let others = ids.into_iter().filter(|id| *id != own);
    let ask = |id| {
        let name = fs::read_to_string(format!("/proc/self/task/{id}/comm")).unwrap_or_default();
        let calls = match signal {
            Ok(_) if Instant::now() >= end => Err("the time for call stacks was over"),
            Ok(signal) => ask(id, signal),
            Err(why) => Err(why),
        };
        ThreadStack { id, name: name.trim_end().to_owned(), calls }
    };
    others.map(ask).collect()
}

/// Installs the handler on the first call and returns its signal, an unused real-time signal.
fn signal() -> Option<c_int> {
    static SIGNAL: OnceLock<Option<c_int>> = OnceLock::new();
    *SIGNAL.get_or_init(|| {
        // Performs the setup of the first unwinding here, rather than in a handler.
        backtrace::trace(|_| false);
        let is_free =
            |signal: &c_int| action_of(*signal).is_some_and(|action| action.sa_sigaction == libc::SIG_DFL);
        let signal = (libc::SIGRTMIN()..=libc::SIGRTMAX()).rev().find(is_free)?;
        // The handler runs on the thread's own stack: the alternate stack may be too small to unwind on.
        // SAFETY: `on_signal` is async-signal-safe; its comment says why.
        unsafe { handle(signal, on_signal, libc::SA_RESTART) }.then_some(signal)
    })
}

fn ask(id: i32, signal: c_int) -> Result<Vec<usize>, &'static str> {
    let begun = Instant::now();
    while ASKED.compare_exchange(NOBODY, PREPARING, Ordering::AcqRel, Ordering::Relaxed).is_err() {
        if begun.elapsed() >= PATIENCE {
            return Err("an earlier thread is still answering");
        }
        thread::yield_now();
    }
    ANSWERED.store(false, Ordering::Relaxed);
    ASKED.store(id, Ordering::Release);
    // SAFETY: the signal has a handler. If the thread has ended meanwhile, the call fails.
    let status = unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), id, signal) };
    if status != 0 {
        ASKED.store(NOBODY, Ordering::Release);
        return Err("it has ended");
    }
    let mut looks = 0u32;
    while !ANSWERED.load(Ordering::Acquire) {
        let is_late = begun.elapsed() >= PATIENCE;
        if is_late && ASKED.compare_exchange(id, NOBODY, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            return Err("it does not answer: it blocks signals, or is in an uninterruptible sleep");
        }
        if begun.elapsed() >= 4 * PATIENCE {
            return Err("it has not finished its answer");
        }
        looks += 1;
        if looks < 100 { thread::yield_now() } else { thread::sleep(Duration::from_micros(100)) }
    }
    let count = COUNT.load(Ordering::Relaxed).min(MOST_CALLS);
    let mut calls: Vec<_> = CALLS[..count].iter().map(|call| call.load(Ordering::Relaxed)).collect();
    // Earlier calls belong to the handler.
    let interrupted = INTERRUPTED.load(Ordering::Relaxed);
    if let Some(begin) = calls.iter().position(|call| *call == interrupted) {
        calls.drain(..begin);
    }
    Ok(calls)
}

/// Async-signal-safe: it writes only atomics and preserves errno. Unwinding reads tables of the program.
extern "C" fn on_signal(_: c_int, _: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the address of this thread's own error number.
    let errno = unsafe { *libc::__errno_location() };
    let own = gettid().as_raw();
    if ASKED.compare_exchange(own, ANSWERING, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
        let mut count = 0;
        INTERRUPTED.store(interrupted_at(context), Ordering::Relaxed);
        // SAFETY: does not take the lock of `trace`, which this thread may hold. The shared state is atomic, and only
        // the thread named by `ASKED` writes it.
        unsafe {
            backtrace::trace_unsynchronized(|frame| {
                CALLS[count].store(frame.ip() as usize, Ordering::Relaxed);
                count += 1;
                count < MOST_CALLS
            });
        }
        COUNT.store(count, Ordering::Relaxed);
        // This order keeps a late answer from being taken for the next thread's.
        ANSWERED.store(true, Ordering::Release);
        ASKED.store(NOBODY, Ordering::Release);
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use kiln_testkit::wait_for;

    use super::*;

    #[inline(never)]
    fn waits_for_message(message: &mpsc::Receiver<()>) {
        let _ = std::hint::black_box(message.recv());
    }

    #[inline(never)]
    fn spins_until_stopped(until: &AtomicBool) {
        while !until.load(Ordering::Relaxed) {
            std::hint::spin_loop();
        }
    }

    fn name_of(address: usize) -> String {
        let mut name = String::new();
        backtrace::resolve(address as *mut c_void, |symbol| name = format!("{:?}", symbol.name()));
        name
    }

    #[test]
    fn waiting_and_working_threads_show_their_calls() {
        let (sender, message) = mpsc::channel();
        static UNTIL: AtomicBool = AtomicBool::new(false);
        let named = |name: &str| thread::Builder::new().name(name.to_owned());
        let waiting = named("waiting").spawn(move || waits_for_message(&message)).unwrap();
        let turning = named("turning").spawn(|| spins_until_stopped(&UNTIL)).unwrap();
        let find = |name: &str, function: &str| {
            wait_for(function, || {
                let stacks = of_all_threads();
                let calls = stacks.iter().find(|stack| stack.name == name).map(|stack| &stack.calls);
                let Some(Ok(calls)) = calls else { return Err(format!("{calls:?}")) };
                let calls: Vec<_> = calls.iter().map(|call| name_of(*call)).collect();
                let is_there = calls.iter().any(|call| call.contains(function));
                if is_there { Ok(calls) } else { Err(calls.join(", ")) }
            })
        };
        // Callees of `function` may come before it, but no frames of the handler.
        for (name, function) in [("turning", "spins_until_stopped"), ("waiting", "waits_for_message")] {
            let calls = find(name, function);
            let is_of_the_handler =
                |call: &String| call.contains("on_signal") || call.contains("backtrace::trace");
            assert!(!calls.iter().any(is_of_the_handler), "the frames of the handler are omitted: {calls:?}");
        }
        sender.send(()).unwrap();
        UNTIL.store(true, Ordering::Relaxed);
        waiting.join().unwrap();
        turning.join().unwrap();
    }
}
