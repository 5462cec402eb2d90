//! Stop checks within a step or an evaluation, and the launcher's grace period.
//!
//! Ranks check in a reduction, to stop at the same place. The number of passes until the next check follows from the
//! longest pass of any rank, which the same reduction exchanges, so that all ranks arrive at the same number.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kiln_collectives::Phase;
use kiln_launch::GRACE;
use kiln_shard::{Engine, ShardError};

use crate::error::Result;
use crate::process::launcher;

/// Time that ranks work between two stop checks.
const ASK_EVERY: Duration = Duration::from_secs(5);

/// The pace of one rank's passes: micro-batches in training, batches in an evaluation.
pub(super) struct Pace {
    /// Passes until the next stop check; the same on all ranks.
    left: u64,
    /// Start of the current pass, and the time for which ranks had been held by then.
    begun: (Instant, Duration),
    longest: f64,
}

impl Pace {
    pub(super) fn new() -> Self {
        Pace { left: 1, begun: (Instant::now(), Duration::ZERO), longest: 0.0 }
    }

    /// Begins a pass. `held` is the total time for which ranks have been held for inspection so far.
    pub(super) fn begin(&mut self, held: Duration) {
        self.begun = (Instant::now(), held);
    }

    /// Ends a pass; the next may begin immediately. Returns whether a stop check is due now.
    pub(super) fn end(&mut self, held: Duration) -> bool {
        let (begun, before) = self.begun;
        let taken = begun.elapsed().saturating_sub(held.saturating_sub(before));
        self.longest = self.longest.max(taken.as_secs_f64());
        self.begin(held);
        self.left = self.left.saturating_sub(1);
        self.left == 0
    }

    /// Makes a stop check due after the next pass, on all ranks alike, because passes of a different kind begin.
    pub(super) fn ask_soon(&mut self) {
        self.left = 1;
    }

    pub(super) fn longest(&self) -> f64 {
        self.longest
    }

    /// Schedules the next check from `longest`, any rank's longest pass in seconds; 0 if no pass has ended.
    pub(super) fn synced(&mut self, longest: f64) {
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
        self.synced(longest);
        Ok((sums[0] > 0.0, longest))
    }
}

fn passes(longest: f64) -> u64 {
    // The conversion saturates.
    (ASK_EVERY.as_secs_f64() / longest).max(1.0) as u64
}

pub(super) struct Grace {
    time: Duration,
    has_warned: bool,
}

impl Grace {
    pub(super) fn new() -> Result<Self> {
        Ok(Grace { time: launcher::grace()?.unwrap_or(GRACE), has_warned: false })
    }

    /// Warns once, on rank 0, if a micro-batch or a step, in seconds, is longer than the grace period.
    pub(super) fn check(&mut self, micro_batch: f64, step: Option<f64>, rank: usize) {
        let time = self.time.as_secs_f64();
        if self.has_warned || rank != 0 {
            return;
        }
        if micro_batch > time {
            tracing::warn!(
                "a micro-batch takes {micro_batch:.1} s, longer than the {time} s between SIGTERM and \
                 SIGKILL: the run may be killed before it has saved. Give it more time, with --grace-s of \
                 `kiln launch` or in the settings of the scheduler, or lower train.micro_batch"
            );
        } else if let Some(step) = step.filter(|step| *step > time) {
            tracing::warn!(
                "a step takes {step:.1} s, longer than the {time} s between SIGTERM and SIGKILL: at SIGTERM, \
                 the run drops its current step and saves the one before. --grace-s of `kiln launch` gives \
                 it more time"
            );
        } else {
            return;
        }
        self.has_warned = true;
    }
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
        pace.synced(0.0);
        assert!(pace.end(Duration::ZERO));
        pace.synced(0.5);
        assert_eq!((0..10).map(|_| pace.end(Duration::ZERO)).position(|due| due), Some(9));
    }
}
