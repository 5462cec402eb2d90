//! Handles signals that ask a run to stop. A signal that the parent process ignores (`nohup`, `trap ''`)
//! stays ignored.

use std::ffi::c_int;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGXCPU};
use signal_hook::low_level;

use super::action::action_of;
use super::{crash, launcher};

/// Signals that arrive sooner than this after the first one belong to the same request: `timeout` sends its
/// signal to the process and then to its group, and on closing, both a terminal and its shell send SIGHUP.
const SAME_REQUEST: Duration = Duration::from_secs(1);

/// Signals that announce the end of a job and only ask to save: SIGUSR1 by convention, SIGUSR2 from submitit,
/// and SIGXCPU from the kernel and from schedulers that limit CPU time.
pub const PREEMPTIONS: [c_int; 3] = [SIGUSR1, SIGUSR2, SIGXCPU];

/// The flag that [`stop_on_signals`] returns.
static STOP: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// The first signal that asked to stop; 0 until one arrives.
static FIRST: AtomicI32 = AtomicI32::new(0);

/// Returns a flag that becomes true on SIGINT, SIGTERM, SIGHUP or one of [`PREEMPTIONS`]; every call returns
/// the same flag. If SIGINT, SIGTERM or SIGHUP arrives again, a second or more after the first of its kind,
/// the process ends immediately. This does not apply to processes started by `kiln launch`. They may get
/// every signal twice, because the launcher forwards signals, and systems such as Slurm and systemd, which
/// stop all processes of a job on a machine, also send them directly.
pub fn stop_on_signals() -> Arc<AtomicBool> {
    let register = || {
        let stop = Arc::default();
        if let Err(error) = register(&stop) {
            tracing::warn!(%error, "signals end this run without a checkpoint");
        }
        stop
    };
    STOP.get_or_init(register).clone()
}

/// True once SIGINT has arrived, even if a different signal came first.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Returns whether [`stop_on_signals`] has been called.
pub(super) fn are_handled() -> bool {
    STOP.get().is_some()
}

/// Returns whether a user at a terminal has asked to stop.
pub fn was_interrupted() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

/// Returns the name of the signal that asked to stop, if one did.
pub fn stop_signal() -> Option<&'static str> {
    low_level::signal_name(FIRST.load(Ordering::Relaxed))
}

fn register(stop: &Arc<AtomicBool>) -> io::Result<()> {
    // The launcher itself ends its ranks when their time is up.
    let may_end = !launcher::is_set();
    // Each kind of signal counts separately: on Ctrl-C, a launcher may send SIGTERM to processes that have
    // already received SIGINT from the terminal, and both belong to one request.
    for signal in [SIGINT, SIGTERM, SIGHUP].into_iter().chain(PREEMPTIONS) {
        if is_ignored(signal) {
            continue;
        }
        let (stop, requests) = (Arc::clone(stop), Requests::default());
        let on_signal = move || {
            let _ = FIRST.compare_exchange(0, signal, Ordering::Relaxed, Ordering::Relaxed);
            INTERRUPTED.fetch_or(signal == SIGINT, Ordering::Relaxed);
            stop.store(true, Ordering::Relaxed);
            if may_end && !PREEMPTIONS.contains(&signal) && requests.is_another(now()) {
                crash::end_at_once(signal);
            }
        };
        // SAFETY: `on_signal` stores atomics, reads the clock (`clock_gettime`), and calls `end_at_once`,
        // which is made for handlers.
        unsafe { low_level::register(signal, on_signal)? };
    }
    Ok(())
}

/// The stop requests by one kind of signal.
#[derive(Default)]
struct Requests {
    /// Arrival time of the first request, as returned by [`now`]; 0 until then.
    first: AtomicU64,
}

impl Requests {
    /// Records a signal at time `now`. Returns whether it belongs to a later request than the first.
    fn is_another(&self, now: u64) -> bool {
        match self.first.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => false,
            Err(first) => u128::from(now.saturating_sub(first)) >= SAME_REQUEST.as_millis(),
        }
    }
}

/// Returns the time of a monotonic clock in milliseconds, never 0. May be called in a signal handler.
fn now() -> u64 {
    let since = clock_gettime(ClockId::CLOCK_MONOTONIC).map(Duration::from).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX).max(1)
}

/// Returns whether this process ignores `signal`.
pub fn is_ignored(signal: c_int) -> bool {
    action_of(signal).is_some_and(|action| action.sa_sigaction == libc::SIG_IGN)
}

/// Lets this process learn how its children end, even if its parent ignores SIGCHLD: a process that ignores
/// SIGCHLD cannot wait for its children. The children inherit the default action.
pub fn hear_of_children() {
    if is_ignored(libc::SIGCHLD) {
        // SAFETY: the default action runs none of our code.
        unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
    }
}

/// Makes a write beyond the file size limit (`ulimit -f`) fail, as on a full disk. By default, SIGXFSZ would
/// end this process without a message. An existing handler is kept.
pub(super) fn let_large_writes_fail() {
    let is_default = |action: libc::sigaction| action.sa_sigaction == libc::SIG_DFL;
    if action_of(libc::SIGXFSZ).is_some_and(is_default) {
        // SAFETY: nothing runs when a signal is ignored.
        unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_within_a_second_are_one_request() {
        let requests = Requests::default();
        assert!([5_000, 5_000, 5_020, 5_999].iter().all(|now| !requests.is_another(*now)));
        assert!(requests.is_another(6_000));
        // Handlers of two threads may have read the clock in a different order.
        let requests = Requests::default();
        assert!(!requests.is_another(5_000) && !requests.is_another(4_999));
    }

    #[test]
    fn actions_are_found() {
        // Rust ignores it in every process.
        assert!(is_ignored(libc::SIGPIPE));
        assert!(!is_ignored(libc::SIGSEGV));
        assert!(action_of(4000).is_none());
    }
}
