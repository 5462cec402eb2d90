//! Training steps on made-up tokens, for measurements that need no data.

use std::fmt::Display;
use std::time::{Duration, Instant};

use burn::tensor::Device;
use kiln_model::layers::TokenLoss;
use kiln_model::{Context, Key, ModelConfig};
use kiln_shard::Outcome;

use crate::config::Config;
use crate::device::ResolvedDevice;
use crate::error::{Result, TrainError};
use crate::kernels;
use crate::run::{MicroBatch, MicroBatches, optimizer_step};
use crate::sharded::ShardedDecoder;

/// A configuration to measure where the user names none: preset 10m with a small batch.
pub fn default_config() -> Config {
    let mut config = Config::default();
    config.model.preset = Some("10m".to_owned());
    config.train.global_batch = 4;
    config.train.micro_batch = 1.into();
    config
}

/// Makes sure that steps of `config` on `device` use no kernel that is wrong there, as every run does before its
/// first step.
///
/// # Errors
///
/// If `KILN_KERNEL_FAULT` names no operation.
pub fn check_kernels(config: &Config, model: &ModelConfig, device: &ResolvedDevice) -> Result<()> {
    kernels::settle(config, model, device, None)
}

/// The most steps or rounds that are measured.
const MAX_COUNT: usize = 1_000_000;

/// Checks numbers of steps or rounds, each given with its flag.
///
/// # Errors
///
/// Names the first flag whose number is 0, or larger than anybody means.
pub fn check_counts(counts: &[(&'static str, usize)]) -> Result<()> {
    match counts.iter().find(|(_, count)| !(1..=MAX_COUNT).contains(count)) {
        Some((flag, _)) => Err(TrainError::usage(format!("{flag} must be from 1 to {MAX_COUNT}"))),
        None => Ok(()),
    }
}

/// The median of `values`; 0 if there are none.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => 0.0,
        odd if odd % 2 == 1 => values[middle],
        _ => 0.5 * (values[middle - 1] + values[middle]),
    }
}

/// What a step took on one rank.
#[derive(Clone, Copy, Debug)]
pub struct StepTimes {
    /// From the end of its last backward pass until its outcome was known.
    pub update: Duration,
    /// From its start until the host had queued all its work for the device. A GPU takes some 1,000 launches
    /// ahead of what it does, so that a host with more of them waits for the GPU, and this is the most that the
    /// host needs.
    pub queued: Duration,
}

/// Trains `model` for one step of `config` on made-up tokens, and waits for its outcome. `loss` takes the place of
/// the cross-entropy. Step `number` has the same tokens on every machine. Returns what it took. Collective.
///
/// # Errors
///
/// As for [`optimizer_step`].
pub fn step(
    config: &Config,
    model: &ShardedDecoder,
    device: &Device,
    loss: Option<&TokenLoss>,
    number: u64,
) -> Result<StepTimes> {
    step_with_outcome(config, model, device, loss, number).map(|(times, _)| times)
}

/// [`step`], which also returns what the step came to.
pub(crate) fn step_with_outcome(
    config: &Config,
    model: &ShardedDecoder,
    device: &Device,
    loss: Option<&TokenLoss>,
    number: u64,
) -> Result<(StepTimes, Option<Outcome>)> {
    let begun = Instant::now();
    let engine = model.engine();
    let (rank, ranks) = (engine.world().rank(), engine.world().world_size());
    let mut tokens = MadeUpTokens {
        step: Key::new(number),
        context: Context::evaluation().with_token_loss(loss.cloned()),
        first: rank * (config.train.global_batch / ranks / config.micro_batch()),
        count: config.micro_batch() * config.data.seq_len,
        vocabulary: engine.layout().groups[0].parameters[0].shape[0] as u64,
        backward_ended: Instant::now(),
    };
    let update = optimizer_step(model, config, device, config.optim.lr, &mut tokens)?;
    device.flush().map_err(failed)?;
    let queued = begun.elapsed();
    let outcome = update.map(|update| engine.outcome(update)).transpose()?;
    Ok((StepTimes { update: tokens.backward_ended.elapsed(), queued }, outcome))
}

/// Waits until `device` has done what this rank has given it.
pub(super) fn settle(device: &Device) -> Result<()> {
    device.sync().map_err(failed)
}

fn failed(error: impl Display) -> TrainError {
    TrainError::Crash(format!("the device has failed: {error}"))
}

/// The micro-batches of one rank and step.
struct MadeUpTokens {
    step: Key,
    /// How the model computes.
    context: Context,
    /// Number of the rank's first micro-batch among those of all ranks.
    first: usize,
    /// Tokens of a micro-batch.
    count: usize,
    /// Number of token ids.
    vocabulary: u64,
    /// When the last backward pass ended.
    backward_ended: Instant,
}

impl MicroBatches for MadeUpTokens {
    fn fetch(&mut self, index: usize) -> Result<MicroBatch> {
        let key = self.step.fork_index((self.first + index) as u64);
        let ids = |first: u64| key.ids(first, self.count, self.vocabulary);
        Ok(MicroBatch { inputs: ids(0), targets: ids(1), context: self.context.clone() })
    }

    fn go_on(&mut self, _: bool) -> Result<bool> {
        self.backward_ended = Instant::now();
        Ok(true)
    }
}
