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

mod action;
mod crash;
mod id;
pub(crate) mod launcher;
mod log;
pub mod output;
mod parent;
mod pool;
pub(crate) mod position;
mod repeat;
mod signals;

use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub use kiln_shard::memory::CountingAllocator;
pub use launcher::GraceError;
pub use log::LogLevelError;
pub use parent::end_with_launcher;
pub use signals::stop_on_signals;

pub(crate) use crash::raise_segv;
pub(crate) use id::ProcessId;
pub(crate) use launcher::state_of;
pub(crate) use pool::in_pool;
pub(crate) use repeat::Repeat;
pub(crate) use signals::{hear_of_children, is_ignored, was_interrupted};

/// Sets up this process for training; returns the flag that asks its runs to stop, for
/// [`RunOptions::stop`](crate::run::RunOptions::stop). To be called first in `main`; later calls
/// change nothing.
///
/// - It ends with the `kiln launch` that has started it.
/// - Warnings go to standard error, as `KILN_LOG` says, unless a `tracing` subscriber is set already.
/// - SIGINT, SIGTERM, SIGHUP and SIGUSR1 ask runs to save and stop; a second SIGINT, SIGTERM or SIGHUP, a
///   second or more after the first, ends the process at once, unless it is a rank of `kiln launch`.
/// - A write beyond the limit on the size of files fails, instead of ending the process with SIGXFSZ.
/// - SIGSEGV and the like are told with rank and step before they end the process.
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
    end_with_launcher();
    let filter = log::filter(std::env::var_os(log::VARIABLE).as_deref())?;
    // Somebody else's subscriber stays.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| output::Console::Stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .log_internal_errors(false)
        .without_time()
        .with_target(false)
        .try_init();
    crash::tell_crashes();
    signals::let_large_writes_fail();
    Ok(())
}

/// Says, once per process, what a run would silently lack: the parts of [`start`] that have not happened,
/// and the allocator. `stops` is whether the caller stops its runs by itself.
pub(crate) fn tell_what_is_missing(stops: bool) {
    static TOLD: AtomicBool = AtomicBool::new(false);
    let is_heard = tracing::dispatcher::has_been_set();
    let mut missing = Vec::new();
    if !is_heard {
        missing.push("warnings are not shown, since no tracing subscriber is set");
    }
    if !stops && !signals::are_handled() {
        missing.push("SIGTERM ends this run without a checkpoint, since no signals are handled");
    }
    if !kiln_shard::memory::is_counting() {
        missing.push(
            "peak_bytes is 0 and memory is not kept from step to step, since the global allocator is \
             not kiln::process::CountingAllocator",
        );
    }
    if missing.is_empty() || TOLD.swap(true, Ordering::Relaxed) {
        return;
    }
    let text = format!(
        "{}; call kiln::process::start first in main, and see the documentation of kiln::process",
        missing.join("; ")
    );
    if is_heard { tracing::warn!("{text}") } else { output::complain(&format!("warning: {text}")) }
}
