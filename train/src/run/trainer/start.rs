//! What rank 0 says before the first step. Making the weights of a large model takes a minute, so what is
//! known without them comes first.

use std::time::{Duration, Instant};

use kiln_shard::{Mesh, ShardError};

use crate::checkpoint::shape_line;
use crate::data::BatchSource;
use crate::error::Result;
use crate::metrics::say;
use crate::run::plan::{Plan, PlanMessage};
use crate::version::version;
use crate::words::number_of;

/// Says what is about to be trained, which has so many `parameters`.
pub(super) fn introduce(plan: &Plan, parameters: usize, ranks: usize, data: &BatchSource) -> Result<()> {
    let Plan { config, model, message: PlanMessage { data: info, threads, .. }, .. } = plan;
    let (train, policy) = (&config.train, config.policy());
    let mesh = Mesh::new(policy.strategy, ranks, config.shard.shard_size);
    let mesh = mesh.map_err(ShardError::from)?;
    say(&plan.device.describe());
    say(&shape_line(model, format_args!("{:.2}M", parameters as f64 / 1e6)));
    say(&format!(
        "ranks: {ranks} x {}, mesh {mesh}, {}, recompute {}",
        number_of(*threads, "thread"),
        config.shard.strategy,
        config.shard.recompute
    ));
    say(&format!(
        "dtypes: master f32, compute {}, reduce {}, accumulate f32",
        policy.compute_dtype, policy.reduce_dtype
    ));
    let samples = data.order().num_samples();
    let micro_batches = match train.global_batch / ranks / config.micro_batch() {
        1 => "1 micro-batch".to_owned(),
        count => format!("{count} micro-batches"),
    };
    say(&format!(
        "batch: {} x {} per step = {} x {} x {}; {} = {:.2} epochs of {}",
        number_of(train.global_batch, "sequence"),
        number_of(config.data.seq_len, "token"),
        number_of(ranks, "rank"),
        micro_batches,
        config.micro_batch(),
        number_of(train.steps, "step"),
        (train.steps * train.global_batch as u64) as f64 / samples as f64,
        number_of(samples, "sample"),
    ));
    if let Some(unigram) = &info.unigram_entropy {
        say(&format!("unigram entropy of the validation text: {:.4} nats per token", unigram.validation));
    }
    Ok(())
}

/// What a start of a run is, in words, for its events: what it goes on from, the build, its ranks and device.
pub(super) fn started_as(plan: &Plan, ranks: usize) -> String {
    let from = plan.resume.as_ref().map_or_else(String::new, |checkpoint| {
        format!("from step {}, {}; ", checkpoint.state().step, checkpoint.folder().display())
    });
    let (strategy, device) = (plan.config.shard.strategy, plan.device.describe());
    format!("{from}kiln {}, {}, {strategy}, {device}", version(), number_of(ranks, "rank"))
}

/// How long something may take before anything is said of it.
const FIRST: Duration = Duration::from_secs(3);

/// How often more is said.
const EVERY: Duration = Duration::from_secs(10);

/// Says how far something is that may take long.
pub(super) struct LongTask {
    what: &'static str,
    begun: Instant,
    next: Instant,
}

impl LongTask {
    pub(super) fn begin(what: &'static str, begun: Instant) -> Self {
        LongTask { what, begun, next: begun + FIRST }
    }

    /// What to say at the time `now`, when `done` of `all` parts are done, if it is time to say something.
    pub(super) fn at(&mut self, now: Instant, done: usize, all: usize) -> Option<String> {
        if now < self.next || done == all {
            return None;
        }
        self.next = now + EVERY;
        let seconds = now.saturating_duration_since(self.begun).as_secs();
        Some(format!("{}: {done} of {all} parts after {seconds} s", self.what))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_takes_long_is_told_now_and_then() {
        let begun = Instant::now();
        let mut task = LongTask::begin("making the first weights", begun);
        let mut at = |seconds, done| task.at(begun + Duration::from_secs(seconds), done, 34);
        assert_eq!(at(2, 1), None);
        let told = "making the first weights: 2 of 34 parts after 4 s";
        assert_eq!(at(4, 2).as_deref(), Some(told));
        assert_eq!(at(13, 9), None);
        assert!(at(14, 10).is_some());
        assert_eq!(at(60, 34), None, "the next line is about what follows");
    }
}
