//! Progress counters for long work.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts the finished parts of a piece of work, for a thread that shows them. Counting never waits.
#[derive(Debug, Default)]
pub struct Meter {
    done: AtomicU64,
    of: AtomicU64,
}

impl Meter {
    /// Begins work of `of` parts, such as bytes; 0 if their number is unknown.
    pub fn begin(&self, of: u64) {
        self.done.store(0, Ordering::Relaxed);
        self.of.store(of, Ordering::Relaxed);
    }

    /// Adds `count` finished parts.
    pub fn add(&self, count: u64) {
        self.done.fetch_add(count, Ordering::Relaxed);
    }

    /// Returns the number of finished parts, and of all parts.
    pub fn read(&self) -> (u64, u64) {
        (self.done.load(Ordering::Relaxed), self.of.load(Ordering::Relaxed))
    }
}
