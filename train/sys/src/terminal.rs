//! Takes the controlling terminal of this process, or lends it to another process for a while.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::thread;

use nix::sys::signal::{SigSet, Signal};
use rustix::process::{Pid, getpgid, getpgrp};
use rustix::termios::{tcgetpgrp, tcsetpgrp};

use super::launcher;

/// Opens the controlling terminal of this process.
fn terminal() -> Option<File> {
    File::options().read(true).write(true).open("/dev/tty").ok()
}

/// Makes `group` the foreground process group of the terminal.
fn give(terminal: &File, group: Pid) {
    // A background process that does this is stopped, unless it has blocked the signal.
    let mut blocked = SigSet::empty();
    blocked.add(Signal::SIGTTOU);
    let _ = blocked.thread_block();
    // If the terminal is gone, there is nothing to do.
    let _ = tcsetpgrp(terminal, group);
    let _ = blocked.thread_unblock();
}

/// Makes this process the foreground process of the terminal. Also makes it ignore Ctrl-Z, because the shell,
/// which waits for the run, would not resume this process.
pub fn take() {
    // SAFETY: no handler is set; the signal is ignored from here on.
    unsafe { libc::signal(libc::SIGTSTP, libc::SIG_IGN) };
    if let Some(terminal) = terminal() {
        give(&terminal, getpgrp());
    }
}

/// Starts `command` on the terminal if this process or its launcher is in the foreground, and takes the
/// terminal back when the command has ended. Returns whether the command has started. The command must call
/// [`take`].
pub fn lend(mut command: Command) -> bool {
    let Some(terminal) = terminal() else { return false };
    let Ok(foreground) = tcgetpgrp(&terminal) else { return false };
    let launcher = launcher::pid().and_then(|pid| getpgid(Some(pid)).ok());
    if foreground != getpgrp() && Some(foreground) != launcher {
        return false;
    }
    let stdio = || terminal.try_clone().map_or_else(|_| Stdio::null(), Stdio::from);
    // A separate group, so that Ctrl-C does not reach the processes of the run.
    command.stdin(stdio()).stdout(stdio()).stderr(stdio()).process_group(0);
    let Ok(mut process) = command.spawn() else { return false };
    let wait = move || {
        let _ = process.wait();
        give(&terminal, foreground);
    };
    // Without the thread, the terminal stays with a process that has ended; the shell takes it back.
    thread::Builder::new().name("kiln-terminal".to_owned()).spawn(wait).is_ok()
}
