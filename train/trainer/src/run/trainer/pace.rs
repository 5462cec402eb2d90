//! Timing of the stop checks between ranks, in addition to the one after every step.
//!
//! All ranks must stop at the same place, so they decide in a reduction. In the middle of a step or an
//! evaluation, that reduction is due after about [`ASK_EVERY`] of work. The number of passes in that time
//! follows from the longest pass of any rank, which the ranks exchange in the same reduction, so all ranks
//! arrive at the same number. Shorter steps never pay for it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kiln_collectives::Phase;
use kiln_shard::{Engine, ShardError};

/// Work between two reductions.
const ASK_EVERY: Duration = Duration::from_secs(5);

/// The pace of one rank's passes: micro-batches in training, batches in an evaluation.
pub(super) struct Pace {
    /// Passes until the next stop check; the same on all ranks.
    left: u64,
    /// Start of the present pass, and the time for which ranks had been held by then.
    begun: (Instant, Duration),
    /// This rank's longest pass since the last stop check, in seconds.
    longest: f64,
}

impl Pace {
    /// Creates a pace without measurements: the ranks check after the first pass.
    pub(super) fn new() -> Self {
        Pace { left: 1, begun: (Instant::now(), Duration::ZERO), longest: 0.0 }
    }

    /// Begins a pass. `held` is the total time for which ranks have been held for inspection so far.
    pub(super) fn begin(&mut self, held: Duration) {
        self.begun = (Instant::now(), held);
    }

    /// Ends a pass, which the next one may follow at once. Returns whether a stop check is due now.
    pub(super) fn end(&mut self, held: Duration) -> bool {
        let (begun, before) = self.begun;
        let taken = begun.elapsed().saturating_sub(held.saturating_sub(before));
        self.longest = self.longest.max(taken.as_secs_f64());
        self.begin(held);
        self.left = self.left.saturating_sub(1);
        self.left == 0
    }

    /// Expects passes of another kind: the ranks check after the first one. To be called on all ranks at the
    /// same place.
    pub(super) fn ask_soon(&mut self) {
        self.left = 1;
    }

    /// Returns this rank's longest pass.
    pub(super) fn longest(&self) -> f64 {
        self.longest
    }

    /// Records the longest pass of any rank in seconds; 0 if no pass has ended since the last stop check.
    pub(super) fn told(&mut self, longest: f64) {
        if longest > 0.0 {
            self.left = passes(longest);
        }
        self.longest = 0.0;
    }

    /// Returns whether any rank must stop, and the longest pass of any rank in seconds. Collective.
    pub(super) fn ask(&mut self, engine: &Engine, stop: &AtomicBool) -> Result<(bool, f64), ShardError> {
        let (rank, ranks) = (engine.world().rank(), engine.world().world_size());
        let mut values = vec![0.0; 1 + ranks];
        values[0] = f64::from(u8::from(stop.load(Ordering::Relaxed)));
        values[1 + rank] = self.longest;
        let sums = engine.all_reduce_f64(Phase::Other, "stop", &values)?;
        let longest = sums[1..].iter().copied().fold(0.0, f64::max);
        self.told(longest);
        Ok((sums[0] > 0.0, longest))
    }
}

/// Returns the number of passes of `longest` seconds that fill [`ASK_EVERY`], at least one.
fn passes(longest: f64) -> u64 {
    // The conversion saturates.
    (ASK_EVERY.as_secs_f64() / longest).max(1.0) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_make_five_seconds() {
        for (longest, expected) in
            [(1e-30, u64::MAX), (0.01, 500), (1.0, 5), (2.0, 2), (4.9, 1), (5.0, 1), (600.0, 1)]
        {
            assert_eq!(passes(longest), expected, "{longest}");
        }
    }

    #[test]
    fn the_first_pass_is_asked_after_and_short_ones_are_not() {
        let mut pace = Pace::new();
        // A stop check before the first pass.
        pace.told(0.0);
        assert!(pace.end(Duration::ZERO));
        pace.told(0.5);
        assert_eq!((0..10).map(|_| pace.end(Duration::ZERO)).position(|due| due), Some(9));
    }
}
