//! Memory that the system has refused, and the threads that must not ask for more because they are reporting
//! a crash.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// Size of the last failed allocation in bytes, and its time in seconds since 1970; 0 before the first.
static BYTES: AtomicUsize = AtomicUsize::new(0);
static AT: AtomicU64 = AtomicU64::new(0);

/// Seconds after a failed allocation in which a panic is attributed to it. A caller may handle the failure; later
/// panics then have another reason.
const FOLLOWS: u64 = 10;

thread_local! {
    /// Set while the thread reports a crash.
    static IS_REPORTING: Cell<bool> = const { Cell::new(false) };
}

/// Marks the calling thread as reporting a crash, for as long as this lives.
pub(super) struct Reporting(bool);

impl Reporting {
    pub(super) fn begin() -> Self {
        Reporting(IS_REPORTING.replace(true))
    }

    /// Returns `true` while the calling thread reports a crash.
    pub(super) fn is_here() -> bool {
        IS_REPORTING.try_with(Cell::get).unwrap_or(false)
    }
}

impl Drop for Reporting {
    fn drop(&mut self) {
        IS_REPORTING.set(self.0);
    }
}

/// Records that an allocation of `bytes` has failed.
pub(super) fn note(bytes: usize) {
    BYTES.store(bytes, Ordering::Relaxed);
    AT.store(now(), Ordering::Relaxed);
}

/// Returns the size of an allocation that has just failed.
pub(super) fn failed_lately() -> Option<usize> {
    let at = AT.load(Ordering::Relaxed);
    (at > 0 && now().saturating_sub(at) <= FOLLOWS).then(|| BYTES.load(Ordering::Relaxed))
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |now| now.as_secs().max(1))
}

/// Makes the last failure older than any panic that follows it.
#[cfg(test)]
pub(super) fn age() {
    AT.store(now() - FOLLOWS - 1, Ordering::Relaxed);
}
