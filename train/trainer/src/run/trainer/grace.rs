//! The grace period between the first signal that asks a run to stop and the one that kills it.

use std::time::Duration;

use crate::error::Result;
use crate::process::launcher;
use kiln_launch::GRACE;

/// The length of the grace period, and whether a warning that it is too short was printed.
pub(super) struct Grace {
    time: Duration,
    told: bool,
}

impl Grace {
    /// Returns the launcher's grace period, or else that of most schedulers.
    pub(super) fn new() -> Result<Self> {
        Ok(Grace { time: launcher::grace()?.unwrap_or(GRACE), told: false })
    }

    /// Warns once, on rank 0, if a micro-batch of `micro_batch` seconds or a step of `step` seconds takes
    /// longer.
    pub(super) fn mind(&mut self, micro_batch: f64, step: Option<f64>, rank: usize) {
        let time = self.time.as_secs_f64();
        if self.told || rank != 0 {
            return;
        }
        if micro_batch > time {
            tracing::warn!(
                "a micro-batch takes {micro_batch:.1} s, longer than the {time} s between SIGTERM and \
                 SIGKILL: a run that is asked to stop may be ended before it has saved. Give it more \
                 time, with --grace-s of `kiln launch` or in the settings of the scheduler, or lower \
                 train.micro_batch"
            );
        } else if let Some(step) = step.filter(|step| *step > time) {
            tracing::warn!(
                "a step takes {step:.1} s, longer than the {time} s between SIGTERM and SIGKILL: a run \
                 that is asked to stop gives up the step it is in and saves the one before. --grace-s of \
                 `kiln launch` gives it more time"
            );
        } else {
            return;
        }
        self.told = true;
    }
}
