//! Handles signals that ask a run to stop. A signal that the parent process ignores (`nohup`, `trap ''`) stays ignored.

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

/// Signals that arrive within this time belong to one request: `timeout` signals the process and then its group, and a
/// closing terminal and its shell both send SIGHUP.
const SAME_REQUEST: Duration = Duration::from_secs(1);

/// Signals that only ask to save before a job ends: SIGUSR1 by convention, SIGUSR2 (submitit), SIGXCPU (schedulers).
pub const PREEMPTIONS: [c_int; 3] = [SIGUSR1, SIGUSR2, SIGXCPU];

static STOP: OnceLock<Arc<AtomicBool>> = OnceLock::new();

static FIRST: AtomicI32 = AtomicI32::new(0);

/// Returns a flag that becomes true on SIGINT, SIGTERM, SIGHUP or one of [`PREEMPTIONS`]. All calls share the flag. A
/// second SIGINT, SIGTERM or SIGHUP, a second or more after the first of its kind, ends the process immediately.
/// Processes started by `kiln launch` ignore the repetition: the launcher, Slurm and systemd may each send the signal.
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

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

pub(super) fn are_handled() -> bool {
    STOP.get().is_some()
}

/// Returns whether SIGINT has arrived.
pub fn was_interrupted() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

/// Returns the name of the signal that asked to stop.
pub fn stop_signal() -> Option<&'static str> {
    low_level::signal_name(FIRST.load(Ordering::Relaxed))
}

fn register(stop: &Arc<AtomicBool>) -> io::Result<()> {
    // The launcher kills its ranks when their time is up.
    let may_end = !launcher::is_set();
    // Kinds count separately: on Ctrl-C, a launcher may send SIGTERM to processes that the terminal has sent SIGINT.
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
        // SAFETY: `on_signal` stores atomics, reads the clock and calls `end_at_once`, which is async-signal-safe.
        unsafe { low_level::register(signal, on_signal)? };
    }
    Ok(())
}

#[derive(Default)]
struct Requests {
    first: AtomicU64,
}

impl Requests {
    fn is_another(&self, now: u64) -> bool {
        match self.first.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => false,
            Err(first) => u128::from(now.saturating_sub(first)) >= SAME_REQUEST.as_millis(),
        }
    }
}

fn now() -> u64 {
    let since = clock_gettime(ClockId::CLOCK_MONOTONIC).map(Duration::from).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX).max(1)
}

/// Returns whether this process ignores `signal`.
pub fn is_ignored(signal: c_int) -> bool {
    action_of(signal).is_some_and(|action| action.sa_sigaction == libc::SIG_IGN)
}

/// Returns a flag that becomes true on SIGINT. A SIGINT while the flag is true ends the process, as does every one
/// before the caller sets it to false for the first time.
///
/// # Errors
///
/// If the system refuses the handler.
pub fn interruption() -> io::Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(true));
    if !is_ignored(SIGINT) {
        // In this order, a signal ends the process only if an earlier one has set the flag.
        signal_hook::flag::register_conditional_default(SIGINT, flag.clone())?;
        signal_hook::flag::register(SIGINT, flag.clone())?;
    }
    Ok(flag)
}

/// Restores the default action of SIGCHLD for this process and its children. A process that ignores SIGCHLD, perhaps by
/// inheritance, cannot wait for its children.
pub fn hear_of_children() {
    if is_ignored(libc::SIGCHLD) {
        // SAFETY: the default action runs none of our code.
        unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
    }
}

/// Makes a write beyond `ulimit -f` fail instead of ending the process. Keeps an existing handler.
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
