//! Signals in the programs that tests start.

use std::os::unix::process::CommandExt as _;
use std::process::Command;

/// Starts `command` with the default actions of signals. The process of the tests may ignore some signals: a shell
/// starts `cargo test &` with SIGINT ignored, and `nohup` ignores SIGHUP.
pub fn with_defaults(command: &mut Command) -> &mut Command {
    let defaults = || {
        let ends = [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM];
        let preemptions = [libc::SIGUSR1, libc::SIGUSR2, libc::SIGXCPU];
        for signal in ends.into_iter().chain(preemptions) {
            // SAFETY: one system call, between fork and exec; no code of ours runs on the signal.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
        Ok(())
    };
    // SAFETY: `defaults` neither locks nor allocates.
    unsafe { command.pre_exec(defaults) }
}
