//! The time between the first signal that asks a run to stop and the one that ends it.

use std::time::Duration;

use crate::launch;
use crate::process::launcher;

/// How much time there is, and whether it was said that it is too short.
pub(super) struct Grace {
    time: Duration,
    told: bool,
}

impl Grace {
    /// What the launcher gives, or else what most schedulers do.
    pub(super) fn new() -> Self {
        Grace { time: launcher::grace().unwrap_or(launch::GRACE), told: false }
    }

    /// Says once, on rank 0, that `what` takes longer than that.
    pub(super) fn mind(&mut self, what: &str, seconds: f64, rank: usize) {
        let time = self.time.as_secs_f64();
        if self.told || rank != 0 || seconds <= time {
            return;
        }
        self.told = true;
        let consequence = match what {
            "a step" => "a run that is asked to stop gives up the step that it is in",
            _ => "a run that is asked to stop may be ended before it has saved",
        };
        tracing::warn!(
            "{what} takes {seconds:.1} s, longer than the {time} s between SIGTERM and SIGKILL: \
             {consequence}. Give it more time, with --grace-s of `kiln launch` or in the settings of the \
             scheduler, or lower train.micro_batch"
        );
    }
}
