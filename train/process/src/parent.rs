//! A rank ends with its launcher.

use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal, test_kill_process};

use super::launcher::{self, state_of};
use super::output::complain;

/// Asks the system to kill this process when its launcher dies, and connects it with the launcher; exits
/// if that is gone already. Does nothing in a process that no launcher has started. To be called first in
/// `main`.
///
/// The request holds between a process and its parent. A program between launcher and rank must
/// therefore become the rank (`exec`); if it waits instead, it outlives a launcher that is killed
/// with SIGKILL, and the rank with it.
pub fn end_with_launcher() {
    let Some(launcher) = launcher::pid() else { return };
    // Only Linux can do this; elsewhere ranks notice that their launcher's pipes are closed.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    if getppid() != Some(launcher) && !is_alive(launcher) {
        complain(&format!("error: the launcher (pid {launcher}) is gone"));
        std::process::exit(1);
    }
    launcher::connect();
}

/// Whether a process exists and is not merely a zombie that nobody has taken note of yet.
fn is_alive(process: Pid) -> bool {
    let zombie = matches!(state_of(process), Some('Z' | 'X'));
    !zombie && test_kill_process(process).is_ok()
}
