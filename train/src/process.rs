//! What a process that trains needs besides the library's functions: signals that ask it to stop, warnings
//! that somebody sees, an end together with its launcher, and an allocator that counts.
//!
//! The binary `kiln` has all of it. A binary of one's own gets it with one call and three lines:
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
//! What of it is missing, [`crate::run::train`] says once. A program that ends with [`output::finish`] also
//! says there what a full disk did not take of its log.

use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use kiln_shard::memory;

use crate::version::version;

pub(crate) use kiln_process::{
    Facts, Meter, ProcessId, Repeat, drills, in_pool, keep, launcher, position, stacks, stop_signal,
    terminal, was_interrupted,
};
pub use kiln_process::{GraceError, LogLevelError, end_with_launcher, output, stop_on_signals};
pub use memory::CountingAllocator;

/// Sets up this process for training; returns the flag that asks its runs to stop, for
/// [`RunOptions::stop`](crate::run::RunOptions::stop). To be called first in `main`; later calls
/// change nothing.
///
/// - It ends with the `kiln launch` that has started it.
/// - Warnings go to standard error, as `KILN_LOG` says, unless a `tracing` subscriber is set already.
/// - SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 and SIGXCPU ask runs to save and stop; a second SIGINT, SIGTERM or
///   SIGHUP, a second or more after the first, ends the process at once, unless it is a rank of `kiln launch`.
/// - A write beyond the limit on the size of files fails, instead of ending the process with SIGXFSZ.
/// - SIGSEGV and the like are told with rank and step before they end the process; what is known of them stays in
///   `crash` in the run folder.
///
/// # Errors
///
/// If `KILN_LOG` says nothing that could be meant.
pub fn start() -> Result<Arc<AtomicBool>, LogLevelError> {
    begin()?;
    Ok(stop_on_signals())
}

/// [`start`] without the signals that ask a run to stop: for programs that have nothing to save.
///
/// # Errors
///
/// As for [`start`].
pub fn begin() -> Result<(), LogLevelError> {
    memory::on_failure(kiln_process::allocation_failed);
    kiln_process::begin(facts())
}

/// The name of this program on a command line, set once it is known to have the commands of `kiln`.
static COMMAND: OnceLock<String> = OnceLock::new();

/// From now on, [`command`] names this program: it has the commands of `kiln`.
pub(crate) fn has_commands() {
    COMMAND.get_or_init(|| {
        let called = std::env::args_os().next().unwrap_or_default();
        // One that is found by way of PATH, or started by `kiln launch` by its whole path.
        match Path::new(&called).file_name().is_none_or(|name| name == "kiln") {
            true => "kiln".to_owned(),
            false => quoted(Path::new(&called)),
        }
    });
}

/// The name of this program on a command line, if it has the commands of `kiln`.
pub(crate) fn command() -> Option<&'static str> {
    COMMAND.get().map(String::as_str)
}

/// A path, quoted for a shell if necessary.
pub(crate) fn quoted(path: &Path) -> String {
    let path = path.display().to_string();
    let is_plain = |c: char| c.is_alphanumeric() || "/._-+=:,@".contains(c);
    if path.chars().all(is_plain) { path } else { format!("'{}'", path.replace('\'', r"'\''")) }
}

/// What the engine and this program know of a process.
fn facts() -> Facts {
    Facts {
        rank_of_thread: memory::bound_rank,
        write_module_of: memory::write_module_of,
        write_holders: memory::write_holders,
        version: version(),
    }
}

/// From now on, crashes of this process leave what is known of them in the folder of their run.
pub(crate) fn keep_crashes() {
    memory::on_failure(kiln_process::allocation_failed);
    kiln_process::keep_crashes(facts());
}

/// Says, once per process, what a run would silently lack: the parts of [`start`] that have not happened,
/// and the allocator. `stops` is whether the caller stops its runs by itself.
pub(crate) fn tell_what_is_missing(stops: bool) {
    kiln_process::tell_what_is_missing(stops, memory::is_counting());
}
