//! Training steps on made-up tokens, for measurements that need no data.

use std::fmt::Display;
use std::time::{Duration, Instant};

use burn::tensor::Device;
use kiln_model::layers::TokenLoss;
use kiln_model::{Context, Key, ModelConfig};
use kiln_shard::Outcome;

use kiln_checkpoint::sharded::ShardedDecoder;
use kiln_config::Config;
use kiln_config::device::ResolvedDevice;
use kiln_train::error::{Result, TrainError};
use kiln_train::kernels;
use kiln_train::run::{MicroBatch, MicroBatches, optimizer_step};

/// Returns the default configuration of a measurement: preset 10m with a small batch.
pub fn default_config() -> Config {
    let mut config = Config::default();
    config.model.preset = Some("10m".to_owned());
    config.train.global_batch = 4;
    config.train.micro_batch = 1.into();
    config
}

/// Ensures that steps of `config` on `device` do not use a wrong kernel, as every run does before its first
/// step.
///
/// # Errors
///
/// If `KILN_KERNEL_FAULT` names an unknown operation.
pub fn check_kernels(config: &Config, model: &ModelConfig, device: &ResolvedDevice) -> Result<()> {
    kernels::settle(config, model, device, None)
}

/// Maximum number of measured steps or rounds.
const MAX_COUNT: usize = 1_000_000;

/// Checks numbers of steps or rounds, each given with its flag.
///
/// # Errors
///
/// Names the first flag whose number is 0, or unreasonably large.
pub fn check_counts(counts: &[(&'static str, usize)]) -> Result<()> {
    match counts.iter().find(|(_, count)| !(1..=MAX_COUNT).contains(count)) {
        Some((flag, _)) => Err(TrainError::usage(format!("{flag} must be from 1 to {MAX_COUNT}"))),
        None => Ok(()),
    }
}

/// Returns the median of `values`; 0 if there are none.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => 0.0,
        odd if odd % 2 == 1 => values[middle],
        _ => 0.5 * (values[middle - 1] + values[middle]),
    }
}

/// Times of a step on one rank.
#[derive(Clone, Copy, Debug)]
pub struct StepTimes {
    /// Time from the end of the last backward pass until the outcome of the step was known.
    pub update: Duration,
    /// Time from the start until the host had queued all its work for the device. A GPU accepts some 1,000
    /// launches in advance, so a host with more of them waits for the GPU, and this is an upper bound of what
    /// the host needs.
    pub queued: Duration,
}

/// Trains `model` for one step of `config` on made-up tokens, and waits for its outcome. `loss` replaces the
/// cross-entropy. Step `number` has the same tokens on every machine. Returns its times. Collective.
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

/// Like [`step`], but also returns the outcome of the step.
pub fn step_with_outcome(
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

/// Waits until `device` has finished the work of this rank.
pub(super) fn settle(device: &Device) -> Result<()> {
    device.sync().map_err(failed)
}

fn failed(error: impl Display) -> TrainError {
    TrainError::Crash(format!("the device has failed: {error}"))
}

/// The micro-batches of one rank and step.
struct MadeUpTokens {
    step: Key,
    /// Settings of the passes.
    context: Context,
    /// Index of the rank's first micro-batch among those of all ranks.
    first: usize,
    /// Tokens per micro-batch.
    count: usize,
    /// Number of token ids.
    vocabulary: u64,
    /// End of the last backward pass.
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
