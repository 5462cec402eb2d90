//! The base crate for processes and files, used by the other crates under `train/`.
//!
//! - [`begin`] sets up a process: output that never blocks, signals, the log and crash reports.
//! - [`files`]: files from untrusted sources, read within limits.
//! - [`durable`]: files written atomically, and [`StagingFolder`] for whole folders.
//! - [`Checksum`]: checksums that combine from the checksums of parts.
//! - [`header`]: headers of safetensors files. [`npy`]: arrays in NumPy's format.
//! - [`Stream`]: large files, written without the system's cache.
//! - [`Lines`] and [`Records`]: files that grow by whole lines or records. [`LineReader`]: lines of limited length.

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
pub use signals::{
    PREEMPTIONS, hear_of_children, interruption, is_ignored, stop_on_signals, stop_signal, was_interrupted,
};
pub use stream::Stream;
pub use threads::{Repeat, in_pool};

/// Sets up this process, except for stop signals: see [`stop_on_signals`]. Call it first in `main`; later calls change
/// nothing. Crash reports and log lines include the `facts`.
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

/// If address space is limited, keeps the allocator from reserving 64 MiB of it per thread.
fn spare_address_space() {
    #[cfg(target_env = "gnu")]
    if rustix::process::getrlimit(rustix::process::Resource::As).current.is_some() {
        // SAFETY: sets a parameter of the allocator, before there is another thread.
        unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
    }
}

/// Makes crashes of this process write reports to their run's folder. Also for programs that do not call [`begin`].
pub fn keep_crashes(facts: Facts) {
    facts::set(facts);
    crash::keep_panics();
}

/// Warns, once per process, about features that a run lacks because the program did not set them up. `stops`: whether
/// the caller handles stop requests. `counts_memory`: whether the global allocator counts memory.
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
