//! Ranks end with their launcher, however it ends.

use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal, test_kill_process};

use super::environment::LAUNCHER_PID;

/// Asks the system to kill this process when its launcher dies; exits if that has happened already.
/// Does nothing in a process that no launcher has started. To be called first in `main`.
///
/// The request holds between a process and its parent. A program between launcher and rank must
/// therefore become the rank (`exec`); if it waits instead, it outlives a launcher that is killed
/// with SIGKILL, and the rank with it.
pub fn end_with_launcher() {
    let Some(launcher) = std::env::var(LAUNCHER_PID).ok().and_then(|pid| pid.parse().ok()) else {
        return;
    };
    let Some(launcher) = Pid::from_raw(launcher) else { return };
    // Only Linux can do this; elsewhere ranks notice that their launcher's pipes are closed.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    if getppid() != Some(launcher) && !is_alive(launcher) {
        eprintln!("error: the launcher (pid {launcher}) is gone");
        std::process::exit(1);
    }
}

/// Whether a process exists and is not merely a zombie that nobody has taken note of yet.
fn is_alive(process: Pid) -> bool {
    let path = format!("/proc/{process}/stat");
    let zombie = std::fs::read_to_string(path).is_ok_and(|stat| {
        // The name before it, in brackets, may hold anything.
        stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with(['Z', 'X']))
    });
    !zombie && test_kill_process(process).is_ok()
}
