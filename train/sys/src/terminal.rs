//! Takes the controlling terminal, or lends it to another process.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::thread;

use nix::sys::signal::{SigSet, Signal};
use rustix::process::{Pid, getpgid, getpgrp};
use rustix::termios::{tcgetpgrp, tcsetpgrp};

use super::launcher;

fn terminal() -> Option<File> {
    File::options().read(true).write(true).open("/dev/tty").ok()
}

fn give(terminal: &File, group: Pid) {
    // SIGTTOU would stop a background process here.
    let mut blocked = SigSet::empty();
    blocked.add(Signal::SIGTTOU);
    let _ = blocked.thread_block();
    let _ = tcsetpgrp(terminal, group);
    let _ = blocked.thread_unblock();
}

/// Makes this process the foreground process of the terminal. Also ignores Ctrl-Z, because the shell waits for the run
/// and would not resume this process.
pub fn take() {
    // SAFETY: no handler is set.
    unsafe { libc::signal(libc::SIGTSTP, libc::SIG_IGN) };
    if let Some(terminal) = terminal() {
        give(&terminal, getpgrp());
    }
}

/// Starts `command` on the terminal if this process or its launcher is in the foreground, and takes the terminal back
/// when the command ends. Returns whether the command started. The command must call [`take`].
pub fn lend(mut command: Command) -> bool {
    let Some(terminal) = terminal() else { return false };
    let Ok(foreground) = tcgetpgrp(&terminal) else { return false };
    let launcher = launcher::pid().and_then(|pid| getpgid(Some(pid)).ok());
    if foreground != getpgrp() && Some(foreground) != launcher {
        return false;
    }
    let stdio = || terminal.try_clone().map_or_else(|_| Stdio::null(), Stdio::from);
    // A separate group keeps Ctrl-C from the processes of the run.
    command.stdin(stdio()).stdout(stdio()).stderr(stdio()).process_group(0);
    let Ok(mut process) = command.spawn() else { return false };
    let wait = move || {
        let _ = process.wait();
        give(&terminal, foreground);
    };
    // If the thread cannot start, the shell takes the terminal back.
    thread::Builder::new().name("kiln-terminal".to_owned()).spawn(wait).is_ok()
}
