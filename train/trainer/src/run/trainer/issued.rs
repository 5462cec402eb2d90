//! A step in progress, and the clock readings that determine when it ended.

use std::time::{Duration, Instant};

use kiln_collectives::ActivityTime;
use kiln_shard::Update;

use crate::run::RecordedStep;
use crate::values::Values;

#[derive(Clone, Debug, PartialEq)]
pub(super) struct ClockReading {
    pub(super) at: Instant,
    pub(super) held: Duration,
    pub(super) times: Vec<ActivityTime>,
}

/// If the host waited for a step's values for more than 1/`WAITED` of the step, the step ended when they arrived.
const WAITED: u32 = 16;

/// Returns the clock reading at the end of a step, which started, or whose previous step ended, at `before`.
/// The host issued it by `issued`, then the next step, requested its values at `asked`, and got them at `now`.
/// If the host waited for the values, the step ended at `now`, otherwise at `issued`.
/// If the previous step ended after `issued`, the end is taken to be halfway between `before` and `asked`.
pub(super) fn end_of_step(
    before: &ClockReading,
    issued: ClockReading,
    asked: Instant,
    now: ClockReading,
) -> ClockReading {
    if now.at - asked > (now.at - before.at) / WAITED {
        now
    } else if before.at <= issued.at {
        issued
    } else {
        ClockReading { at: before.at + (asked - before.at) / 2, ..now }
    }
}

/// A step that has been issued to the device. On a GPU, nothing about its outcome is known yet.
pub(super) struct IssuedStep {
    pub(super) step: u64,
    pub(super) update: Update,
    pub(super) lr: f64,
    pub(super) start: ClockReading,
    pub(super) end: ClockReading,
    pub(super) peak_bytes: u64,
    pub(super) tokens: u64,
    pub(super) log: Option<StepLog>,
}

pub(super) struct StepLog {
    pub(super) recorded: RecordedStep,
    pub(super) any_recorded: bool,
    /// Values besides those of layers, metrics and the step itself: gradient norms, and those of the loop.
    pub(super) values: Values,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(before: u64, issued: u64, asked: u64, now: u64) -> u64 {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let reading = |ms| ClockReading { at: at(ms), held: Duration::from_millis(ms), times: Vec::new() };
        let end = end_of_step(&reading(before), reading(issued), at(asked), reading(now));
        (end.at - start).as_millis() as u64
    }

    #[test]
    fn a_step_ends_when_its_values_are_there_if_the_host_has_waited_for_them() {
        assert_eq!(end(1000, 900, 1100, 2000), 2000);
        assert_eq!(end(1000, 1100, 1200, 2000), 2000);
    }

    #[test]
    fn every_step_takes_the_time_of_the_host_if_the_gpu_is_faster() {
        let ends = [end(0, 100, 200, 201), end(100, 200, 300, 301), end(200, 300, 400, 401)];
        assert_eq!(ends, [100, 200, 300]);
        // The GPU was slower so far: the next step is assigned some of the time.
        let ended = end(150, 100, 250, 251);
        assert_eq!(ended, 200);
        assert_eq!(end(ended, 250, 350, 351), 250);
    }
}
