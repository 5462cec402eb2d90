//! A step that is under way.

use std::time::{Duration, Instant};

use kiln_collectives::ActivityTime;
use kiln_shard::Update;

use crate::run::RecordedStep;
use crate::values::Values;

/// What the clocks of a rank say at one moment.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ClockReading {
    pub(super) at: Instant,
    /// How long ranks have been held until then.
    pub(super) held: Duration,
    /// Where the time of the rank has gone until then.
    pub(super) times: Vec<ActivityTime>,
}

/// The part of a step for which the host has to have waited for the GPU, so that it knows when the step
/// ended.
const WAITED: u32 = 16;

/// When a step ended whose values the host has `asked` for, and got `now`, after it had given the device the
/// next step as well. `before` is when the step began, or the one before it ended, and `issued` when the
/// device had been given all of it.
///
/// If the host has waited for the values, the step ended now. If they were there, the GPU is faster than the
/// host, and had done the step when it had been given the last of it, or soon afterwards. (If the step before
/// had not ended by then, this one ended at an unknown moment between that and the question.)
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

/// A step that has been given to the device. Of a GPU, nothing of it is known yet.
pub(super) struct Issued {
    pub(super) step: u64,
    pub(super) update: Update,
    pub(super) lr: f64,
    pub(super) start: ClockReading,
    /// When the device had been given all of it.
    pub(super) end: ClockReading,
    pub(super) peak_bytes: u64,
    /// Tokens trained on up to here.
    pub(super) tokens: u64,
    /// What goes into the log besides; `None` if the step is not logged.
    pub(super) log: Option<StepLog>,
}

/// What is written of a step that is logged, besides what every step has.
pub(super) struct StepLog {
    /// What the layers of this rank have recorded.
    pub(super) recorded: RecordedStep,
    /// Whether the layers of any rank have recorded anything.
    pub(super) any_recorded: bool,
    /// The norm of the gradient by module, if it is wanted.
    pub(super) grad_norms: Values,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The end of a step, all in milliseconds.
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
        // The first one after an evaluation.
        assert_eq!(end(1000, 1100, 1200, 2000), 2000);
    }

    #[test]
    fn every_step_takes_the_time_of_the_host_if_the_gpu_is_faster() {
        // Each is given to the GPU within 100 ms, and asked for when the next one has been given.
        let ends = [end(0, 100, 200, 201), end(100, 200, 300, 301), end(200, 300, 400, 401)];
        assert_eq!(ends, [100, 200, 300]);
        // The GPU was slower up to now: the next step is left some of the time.
        let ended = end(150, 100, 250, 251);
        assert_eq!(ended, 200);
        assert_eq!(end(ended, 250, 350, 351), 250);
    }
}
