//! Signals that ask a run to stop. A signal that whoever started the process had ignored (`nohup`,
//! `trap ''`) stays ignored.

use std::ffi::c_int;
use std::io;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use signal_hook::flag;

use super::launcher;

/// What signals have asked for.
#[derive(Default)]
struct Asked {
    stop: Arc<AtomicBool>,
    /// Whether it was Ctrl-C.
    interrupted: Arc<AtomicBool>,
}

static ASKED: OnceLock<Asked> = OnceLock::new();

/// A flag that becomes true on SIGINT, SIGTERM or SIGUSR1, the same one at every call. A second SIGINT or a
/// second SIGTERM ends the process at once, unless a `kiln launch` has started it: that passes on what it is
/// sent, and who stops all processes of a machine's job, as Slurm and systemd do, has sent it to the rank as well.
pub fn stop_on_signals() -> Arc<AtomicBool> {
    ASKED.get_or_init(register).stop.clone()
}

/// Whether [`stop_on_signals`] has been called.
pub(crate) fn are_handled() -> bool {
    ASKED.get().is_some()
}

/// Whether somebody at a terminal has asked for the stop.
pub(crate) fn was_interrupted() -> bool {
    ASKED.get().is_some_and(|asked| asked.interrupted.load(Ordering::Relaxed))
}

fn register() -> Asked {
    let asked = Asked::default();
    if let Err(error) = set_on_signals(&asked) {
        tracing::warn!(%error, "signals end this run without a checkpoint");
    }
    asked
}

fn set_on_signals(asked: &Asked) -> io::Result<()> {
    // Each counts for itself: on Ctrl-C a launcher may send SIGTERM to processes that the terminal has sent
    // SIGINT already, and that is one request.
    let terminated = Arc::default();
    for (signal, before) in [(SIGINT, &asked.interrupted), (SIGTERM, &terminated)] {
        if is_ignored(signal) {
            continue;
        }
        // A launcher ends its ranks itself when their time is up.
        if !launcher::is_set() {
            // Before the flag is set, so that the first signal finds it unset. The exit code is the one by which
            // shells show the signal.
            flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(before))?;
        }
        flag::register(signal, Arc::clone(before))?;
        flag::register(signal, Arc::clone(&asked.stop))?;
    }
    if !is_ignored(SIGUSR1) {
        flag::register(SIGUSR1, Arc::clone(&asked.stop))?;
    }
    Ok(())
}

/// Whether `signal` is ignored.
pub(crate) fn is_ignored(signal: c_int) -> bool {
    action_of(signal).is_some_and(|action| action.sa_sigaction == libc::SIG_IGN)
}

/// Lets this process learn how its children end, whatever the one that started it does on SIGCHLD: a process
/// that ignores SIGCHLD cannot wait for its children. They get the default as well.
pub(crate) fn hear_of_children() {
    if is_ignored(libc::SIGCHLD) {
        // SAFETY: the default action is no code of ours that could run.
        unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
    }
}

/// Makes a write beyond the limit on the size of files (`ulimit -f`) fail, as it does on a full disk. By
/// default, SIGXFSZ would end this process with nothing said. A handler that is set already stays.
pub(super) fn let_large_writes_fail() {
    let is_default = |action: libc::sigaction| action.sa_sigaction == libc::SIG_DFL;
    if action_of(libc::SIGXFSZ).is_some_and(is_default) {
        // SAFETY: nothing runs when a signal is ignored.
        unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    }
}

/// What happens on `signal`; `None` if there is no such signal.
pub(super) fn action_of(signal: c_int) -> Option<libc::sigaction> {
    // SAFETY: all fields of the plain C structure may be zero.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: without a new action the call only writes the present one to `action`.
    let status = unsafe { libc::sigaction(signal, ptr::null(), &raw mut action) };
    (status == 0).then_some(action)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn actions_can_be_asked_for() {
        // Rust ignores it in every process.
        assert!(is_ignored(libc::SIGPIPE));
        assert!(!is_ignored(libc::SIGSEGV));
        assert!(action_of(4000).is_none());
    }
}
