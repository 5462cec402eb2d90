//! How far a long piece of work is, as whoever does it counts.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts what is done of a piece of work, for somebody who shows it. Counting waits for nobody.
#[derive(Debug, Default)]
pub struct Meter {
    done: AtomicU64,
    of: AtomicU64,
}

impl Meter {
    /// Work of `of` parts begins, such as bytes; 0 if it is not known how many there are.
    pub fn begin(&self, of: u64) {
        self.done.store(0, Ordering::Relaxed);
        self.of.store(of, Ordering::Relaxed);
    }

    /// `count` more parts are done.
    pub fn add(&self, count: u64) {
        self.done.fetch_add(count, Ordering::Relaxed);
    }

    /// How many parts are done, and how many there are.
    pub fn read(&self) -> (u64, u64) {
        (self.done.load(Ordering::Relaxed), self.of.load(Ordering::Relaxed))
    }
}
