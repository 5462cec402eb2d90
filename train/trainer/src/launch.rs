//! Starts a node's ranks through [`kiln_launch`], for commands that are started once per node.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::run;
use kiln_config::device;
use kiln_launch::place::Node;

pub use kiln_launch::{GRACE, LaunchArgsError, LaunchError, Options, PREEMPTED, run};
pub use kiln_sys::end_with_launcher;

/// Starts the ranks of a node with the arguments of this process, and returns the exit code.
pub fn run_node(node: Node) -> Result<u8, LaunchArgsError> {
    let node = node.with_gpus(count_gpus)?;
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let log_dir = log_dir_of(&arguments);
    Ok(run(&Options { node, program: this_program()?, arguments, log_dir, grace: GRACE })?)
}

/// Returns the number of GPUs of this machine.
pub fn count_gpus() -> Result<usize, String> {
    device::count_gpus().map_err(|error| error.in_short())
}

/// Returns the path of this program's executable.
pub fn this_program() -> Result<PathBuf, LaunchError> {
    std::env::current_exe()
        .map_err(|source| LaunchError::System { what: "find this program's own file", source })
}

/// Returns `PET_LOG_DIR` if it is set, else `<out>/logs` if the command names a run folder, as `train` and `check` do.
pub fn log_dir_of(command: &[OsString]) -> Option<PathBuf> {
    if let Some(folder) = std::env::var_os("PET_LOG_DIR").filter(|folder| !folder.is_empty()) {
        return Some(folder.into());
    }
    // The `--out` of other commands is a file, or has a meaning that only the program knows.
    if !command.first().is_some_and(|word| word == "train" || word == "check") {
        return None;
    }
    // `train --resume RUN` continues in RUN.
    if let [train, resume, from, ..] = command
        && train == "train"
        && resume == "--resume"
    {
        let run = run::run_of(Path::new(from));
        return run.join("run.json").is_file().then(|| run.join(kiln_launch::LOGS));
    }
    let after = command.iter().position(|argument| argument == "--out");
    let out = match after.and_then(|at| command.get(at + 1)) {
        Some(out) => PathBuf::from(out),
        None => command.iter().find_map(|argument| argument.to_str()?.strip_prefix("--out="))?.into(),
    };
    // The ranks will refuse a folder with foreign content, so nothing may be written there first.
    (!run::is_foreign(&out)).then(|| out.join(kiln_launch::LOGS))
}
