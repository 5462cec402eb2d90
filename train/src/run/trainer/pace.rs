//! When the ranks ask each other whether to stop, besides after every step.
//!
//! All ranks have to stop at the same place, so they decide in a reduction. In the middle of a step, or of
//! an evaluation, that reduction is due after about [`ASK_EVERY`] of work. How many passes that is follows
//! from the longest pass of any rank, which the ranks tell each other in the same reduction, so all of them
//! come to the same number. Steps that are shorter than that never pay for it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kiln_collectives::Phase;
use kiln_shard::{Engine, ShardError};

/// Work between two reductions.
const ASK_EVERY: Duration = Duration::from_secs(5);

/// The pace of one rank's passes: micro-batches in training, batches in an evaluation.
pub(super) struct Pace {
    /// Passes until the ranks ask each other again; the same on all ranks.
    left: u64,
    /// When the present pass began, and how long ranks had been held by then.
    begun: (Instant, Duration),
    /// This rank's longest pass since the ranks asked each other, in seconds.
    longest: f64,
}

impl Pace {
    /// A pace of which nothing is known: the ranks ask each other after the first pass.
    pub(super) fn new() -> Self {
        Pace { left: 1, begun: (Instant::now(), Duration::ZERO), longest: 0.0 }
    }

    /// A pass begins. `held` is how long ranks were held up to now, for somebody to look into them.
    pub(super) fn begin(&mut self, held: Duration) {
        self.begun = (Instant::now(), held);
    }

    /// A pass ends, and the next one may follow at once. Returns whether the ranks are to ask each other now.
    pub(super) fn end(&mut self, held: Duration) -> bool {
        let (begun, before) = self.begun;
        let taken = begun.elapsed().saturating_sub(held.saturating_sub(before));
        self.longest = self.longest.max(taken.as_secs_f64());
        self.begin(held);
        self.left = self.left.saturating_sub(1);
        self.left == 0
    }

    /// The passes that come now are of another kind: the ranks ask each other after the first one. To be called on all
    /// ranks at the same place.
    pub(super) fn ask_soon(&mut self) {
        self.left = 1;
    }

    /// What this rank has to tell.
    pub(super) fn longest(&self) -> f64 {
        self.longest
    }

    /// Takes note of the longest pass of any rank in seconds; 0 if there was none since they asked each
    /// other.
    pub(super) fn told(&mut self, longest: f64) {
        if longest > 0.0 {
            self.left = passes(longest);
        }
        self.longest = 0.0;
    }

    /// Whether any rank is to stop, and the longest pass of any of them in seconds. Collective.
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

/// Passes of `longest` seconds that make [`ASK_EVERY`], at least one.
fn passes(longest: f64) -> u64 {
    // A conversion that is too large gives the largest number.
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
        // Asked before the first pass.
        pace.told(0.0);
        assert!(pace.end(Duration::ZERO));
        pace.told(0.5);
        assert_eq!((0..10).map(|_| pace.end(Duration::ZERO)).position(|due| due), Some(9));
    }
}
