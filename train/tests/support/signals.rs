//! Signals of the programs that tests start.

use std::os::unix::process::CommandExt as _;
use std::process::Command;

/// Starts `command` with the default actions of signals. The tests' own process may have some ignored:
/// a shell starts `cargo test &` with SIGINT ignored, `nohup` with SIGHUP.
pub fn with_defaults(command: &mut Command) -> &mut Command {
    let defaults = || {
        for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM, libc::SIGUSR1] {
            // SAFETY: one system call, between fork and exec; no code of ours runs on the signal.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
        Ok(())
    };
    // SAFETY: `defaults` neither locks nor allocates.
    unsafe { command.pre_exec(defaults) }
}
