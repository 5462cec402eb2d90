//! The base crate for processes and files, which all other crates under `train/` may use.
//!
//! Processes: [`begin`] sets up output that never blocks, signals, a visible log and crash reports, and makes
//! this process end with its launcher. The binary `kiln` calls it first.
//!
//! Files, for data, checkpoints and run folders alike:
//!
//! - [`files`]: files that may come from untrusted sources, read within limits;
//! - [`durable`]: files that are on disk completely or not at all, and [`StagingFolder`] for whole folders;
//! - [`Checksum`]: checksums that can be combined from the checksums of parts;
//! - [`header`]: the header of a safetensors file;
//! - [`npy`]: arrays in NumPy's format;
//! - [`Stream`]: large files, written without the system's cache; [`Lines`] and [`Records`]: files that grow
//!   by whole lines or records; [`LineReader`]: lines of limited length.
//!
//! Nothing here knows the purpose of a file: callers add their own context to [`std::io::Error`].

mod action;
mod checksum;
mod crash;
pub mod drills;
pub mod durable;
mod facts;
pub mod files;
pub mod header;
mod id;
pub mod launcher;
mod lines;
mod log;
pub mod npy;
pub mod output;
pub mod position;
mod signals;
pub mod stacks;
mod stream;
pub mod terminal;
mod threads;
pub mod words;

use std::sync::atomic::{AtomicBool, Ordering};

pub use checksum::{Checksum, RunningChecksum};
pub use crash::{allocation_failed, keep, report_killed};
pub use durable::StagingFolder;
pub use facts::Facts;
pub use id::ProcessId;
pub use launcher::{GraceError, end_with_launcher, state_of};
pub use lines::{LineReader, Lines, MAX_LINE, Records};
pub use log::{LogLevelError, is_detail};
pub use output::Meter;
pub use signals::{PREEMPTIONS, hear_of_children, is_ignored, stop_on_signals, stop_signal, was_interrupted};
pub use stream::Stream;
pub use threads::{Repeat, in_pool};

/// Sets up this process, except for the signals that ask a run to stop: see [`stop_on_signals`]. Call it
/// first in `main`; later calls change nothing. Crash reports and log lines include the `facts`.
///
/// # Errors
///
/// If the value of `KILN_LOG` is invalid.
pub fn begin(facts: Facts) -> Result<(), LogLevelError> {
    facts::set(facts);
    spare_address_space();
    end_with_launcher();
    let filter = log::filter(std::env::var_os(log::VARIABLE).as_deref())?;
    log::show(filter);
    crash::report_signals();
    signals::let_large_writes_fail();
    Ok(())
}

/// If the address space is limited, keeps the system's allocator from reserving 64 MiB of it for each thread.
fn spare_address_space() {
    #[cfg(target_env = "gnu")]
    if rustix::process::getrlimit(rustix::process::Resource::As).current.is_some() {
        // SAFETY: sets a parameter of the allocator, before there is another thread.
        unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
    }
}

/// Makes crashes of this process write reports to the folder of their run. Also meant for programs that do
/// not call [`begin`].
pub fn keep_crashes(facts: Facts) {
    facts::set(facts);
    crash::keep_panics();
}

/// Warns, once per process, about features that a run would silently lack because parts of
/// `kiln::process::start` were not run, or because of the allocator. `stops`: whether the caller handles stop
/// requests itself; `counts_memory`: whether the global allocator counts memory.
pub fn tell_what_is_missing(stops: bool, counts_memory: bool) {
    static TOLD: AtomicBool = AtomicBool::new(false);
    let is_heard = tracing::dispatcher::has_been_set();
    let mut missing = Vec::new();
    if !is_heard {
        missing.push("warnings are not shown, since no tracing subscriber is set");
    }
    if !stops && !signals::are_handled() {
        missing.push("SIGTERM ends this run without a checkpoint, since no signals are handled");
    }
    if !counts_memory {
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
    match is_heard {
        true => tracing::warn!("{text}"),
        false => output::eprint_line(&format!("warning: {text}")),
    }
}
