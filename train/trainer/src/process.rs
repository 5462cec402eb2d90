//! Process-wide setup for training: stop signals, warnings, exit with the launcher, and a counting allocator.
//!
//! The binary `kiln` has this setup. A custom binary gets it with one call and three lines:
//!
//! ```ignore
//! #[global_allocator]
//! static ALLOCATOR: kiln::process::CountingAllocator = kiln::process::CountingAllocator;
//!
//! fn main() -> Result<(), kiln::run::TrainError> {
//!     let options = kiln::run::RunOptions::from_environment()?; // calls `kiln::process::start`
//!     let config = kiln::config::load("run.toml".as_ref(), &[])?;
//!     kiln::run::train(config, &options).map(drop)
//! }
//! ```
//!
//! [`crate::run::train`] reports missing parts once. [`output::finish`] reports log output lost to a full disk.

use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use kiln_shard::memory;

use crate::version::version;

pub use kiln_sys::{
    Facts, Meter, ProcessId, Repeat, drills, in_pool, keep, launcher, position, stacks, stop_signal,
    terminal, was_interrupted,
};
pub use kiln_sys::{GraceError, LogLevelError, end_with_launcher, output, stop_on_signals};
pub use memory::CountingAllocator;

/// Sets up this process for training; returns the flag that asks its runs to stop, for
/// [`RunOptions::stop`](crate::run::RunOptions::stop). Call it first in `main`; later calls have no effect.
///
/// - The process exits when the `kiln launch` that started it exits.
/// - Warnings go to standard error at the level of `KILN_LOG`, unless a `tracing` subscriber is set already.
/// - SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 and SIGXCPU ask runs to save and stop; another SIGINT, SIGTERM
///   or SIGHUP at least one second later ends the process at once, unless it is a rank of `kiln launch`.
/// - A write beyond the file size limit fails, instead of ending the process with SIGXFSZ.
/// - SIGSEGV and similar signals are reported with rank and step; details go to `crash` in the run folder.
///
/// # Errors
///
/// If `KILN_LOG` is invalid.
pub fn start() -> Result<Arc<AtomicBool>, LogLevelError> {
    begin()?;
    Ok(stop_on_signals())
}

/// Like [`start`], but without the signals that ask a run to stop: for programs that have nothing to save.
pub fn begin() -> Result<(), LogLevelError> {
    memory::on_failure(kiln_sys::allocation_failed);
    kiln_sys::begin(facts())
}

static COMMAND: OnceLock<String> = OnceLock::new();

/// Records that this program accepts the commands of `kiln`, so that [`command`] returns the program's name.
pub fn has_commands() {
    COMMAND.get_or_init(|| {
        let called = std::env::args_os().next().unwrap_or_default();
        // Found through PATH, or started by `kiln launch` by its full path.
        match Path::new(&called).file_name().is_none_or(|name| name == "kiln") {
            true => "kiln".to_owned(),
            false => quoted(Path::new(&called)),
        }
    });
}

/// Returns the command-line name of this program, if the program accepts the commands of `kiln`.
pub fn command() -> Option<&'static str> {
    COMMAND.get().map(String::as_str)
}

/// Quotes a path for a shell if necessary.
pub fn quoted(path: &Path) -> String {
    let path = path.display().to_string();
    let is_plain = |c: char| c.is_alphanumeric() || "/._-+=:,@".contains(c);
    if path.chars().all(is_plain) { path } else { format!("'{}'", path.replace('\'', r"'\''")) }
}

fn facts() -> Facts {
    Facts {
        rank_of_thread: memory::bound_rank,
        write_module_of: memory::write_module_of,
        write_holders: memory::write_holders,
        version: version(),
    }
}

/// Makes later crashes of this process leave a report in the run folder.
pub fn keep_crashes() {
    memory::on_failure(kiln_sys::allocation_failed);
    kiln_sys::keep_crashes(facts());
}

/// Warns once about missing parts of the setup; `stops` is true if the caller stops its runs itself.
pub fn tell_what_is_missing(stops: bool) {
    kiln_sys::tell_what_is_missing(stops, memory::is_counting());
}
