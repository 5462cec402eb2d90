//! Ending a rank together with its launcher.

use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal, test_kill_process};

use super::launcher::{self, state_of};
use super::output::complain;

/// Asks the system to kill this process when its launcher dies, and connects it to the launcher; exits if the
/// launcher is already gone. Does nothing in a process that no launcher has started. Call it first in `main`.
///
/// The request holds between a process and its parent. A program between launcher and rank must therefore
/// become the rank (`exec`); if it waits instead, it outlives a launcher that is killed with SIGKILL, and so
/// does the rank.
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

/// Returns true if a process exists and is not a zombie.
fn is_alive(process: Pid) -> bool {
    let zombie = matches!(state_of(process), Some('Z' | 'X'));
    !zombie && test_kill_process(process).is_ok()
}
