//! The setup of every Kiln process, whatever command it runs: output that never blocks, stop signals, a
//! visible log, crash reports, and an end together with its launcher.
//!
//! The binary `kiln` calls [`begin`] first. The crate `kiln` adds the parts that need its engine: see
//! `kiln::process`.

mod action;
mod clock;
mod crash;
pub mod drills;
mod facts;
mod id;
pub mod launcher;
mod log;
mod meter;
pub mod output;
pub mod page;
mod parent;
mod pool;
pub mod position;
mod repeat;
mod signals;
pub mod stacks;
pub mod terminal;
pub mod words;

use std::sync::atomic::{AtomicBool, Ordering};

pub use crash::{allocation_failed, keep, words as crash_words};
pub use facts::Facts;
pub use id::ProcessId;
pub use launcher::{GraceError, state_of};
pub use log::{LogLevelError, is_detail};
pub use meter::Meter;
pub use parent::end_with_launcher;
pub use pool::in_pool;
pub use repeat::Repeat;
pub use signals::{PREEMPTIONS, hear_of_children, is_ignored, stop_on_signals, stop_signal, was_interrupted};

/// Sets up this process, except for the signals that ask a run to stop: see [`stop_on_signals`]. Call it
/// first in `main`; later calls change nothing. Crash reports and log lines include the `facts`.
///
/// # Errors
///
/// If the value of `KILN_LOG` is invalid.
pub fn begin(facts: Facts) -> Result<(), LogLevelError> {
    facts::know(facts);
    spare_address_space();
    end_with_launcher();
    let filter = log::filter(std::env::var_os(log::VARIABLE).as_deref())?;
    log::show(filter);
    crash::tell_crashes();
    signals::let_large_writes_fail();
    Ok(())
}

/// Under a limit of the address space, keeps the system's allocator from reserving 64 MiB of it for each
/// thread.
fn spare_address_space() {
    #[cfg(target_env = "gnu")]
    if rustix::process::getrlimit(rustix::process::Resource::As).current.is_some() {
        // SAFETY: sets a parameter of the allocator, before there is another thread.
        unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
    }
}

/// Makes crashes of this process write reports to the folder of their run. For runs, including those of
/// programs that do not call [`begin`].
pub fn keep_crashes(facts: Facts) {
    facts::know(facts);
    crash::keep_panics();
}

/// Reports, once per process, features that a run would silently lack: the parts of `kiln::process::start`
/// that have not been run, and the allocator. `stops`: whether the caller stops its runs by itself;
/// `counts_memory`: whether the global allocator counts.
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
        false => output::complain(&format!("warning: {text}")),
    }
}
