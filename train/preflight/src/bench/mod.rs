//! Measurements: `kiln bench strategies`, `kiln bench network` and `kiln tune`.

mod network;
mod rounds;
mod strategies;
mod tune;
mod ways;

use std::fmt::Display;
use std::time::{Duration, Instant};

use burn::tensor::Device;
use kiln_model::{Context, Key, ModelConfig};
use kiln_shard::Outcome;

use kiln_checkpoint::sharded::ShardedDecoder;
use kiln_config::Config;
use kiln_config::device::ResolvedDevice;
use kiln_train::error::{Result, TrainError};
use kiln_train::kernels;
use kiln_train::passes::{MicroBatch, RunLoss, forward_backward, micro_batches, tokens_of_step};

pub use network::NetworkArgs;
pub use rounds::{StrategyRow, prepare};
pub use strategies::{StrategiesArgs, StrategiesOptions, StrategiesTable, strategies};
pub use tune::{TuneArgs, share_of_percent};

fn unknown_ranks() -> TrainError {
    TrainError::usage(
        "the number of ranks is missing: give --ranks N for threads of this process, or start processes with \
         `kiln launch`",
    )
}

/// Returns the default configuration of a measurement: preset 10m with a small batch.
pub fn default_config() -> Config {
    let mut config = Config::default();
    config.model.preset = Some("10m".to_owned());
    config.train.global_batch = 4;
    config.train.micro_batch = 1.into();
    config
}

/// Checks the kernels that steps of `config` use on `device`, and replaces faulty ones.
///
/// # Errors
///
/// If `KILN_KERNEL_FAULT` names an unknown operation.
pub fn check_kernels(config: &Config, model: &ModelConfig, device: &ResolvedDevice) -> Result<()> {
    kernels::settle(config, model, device, None)
}

const MAX_COUNT: usize = 1_000_000;

/// Checks numbers of steps or rounds, each given with the name of its flag.
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

/// Times of one step on one rank.
#[derive(Clone, Copy, Debug)]
pub struct StepTimes {
    /// Time from the end of the last backward pass to the step's outcome.
    pub update: Duration,
    /// Time until the host has queued the step's work for the device.
    /// Above about 1,000 launches the host waits for the GPU, so this is an upper bound of the host's own time.
    pub queued: Duration,
}

/// Trains `model` for one step of `config` on made-up tokens. Fails as [`forward_backward`] does. Collective.
/// Step `number` has the same tokens on every machine.
pub fn step(
    config: &Config,
    model: &ShardedDecoder,
    device: &Device,
    loss: &RunLoss,
    number: u64,
) -> Result<StepTimes> {
    step_with_outcome(config, model, device, loss, number).map(|(times, _)| times)
}

pub(crate) fn step_with_outcome(
    config: &Config,
    model: &ShardedDecoder,
    device: &Device,
    loss: &RunLoss,
    number: u64,
) -> Result<(StepTimes, Outcome)> {
    let start = Instant::now();
    let engine = model.engine();
    let (rank, ranks) = (engine.world().rank(), engine.world().world_size());
    let key = Key::new(number);
    let context = Context::evaluation();
    let micro_batches = micro_batches(config, ranks);
    let (first, tokens) = (rank * micro_batches, config.micro_batch() * config.data.seq_len);
    let vocabulary = engine.layout().groups[0].parameters[0].shape[0] as u64;
    engine.begin_step();
    for index in 0..micro_batches {
        let key = key.fork_index((first + index) as u64);
        let ids = |first: u64| key.ids(first, tokens, vocabulary);
        let batch = MicroBatch { inputs: ids(0), targets: ids(1), weights: None, context: context.clone() };
        let last = index + 1 == micro_batches;
        forward_backward(model, loss, config, device, batch, tokens_of_step(config), last)?;
    }
    let backward_ended = Instant::now();
    engine.set_activity("optimizer");
    let update = engine.update(config.optim.lr, config.optim.grad_clip)?;
    device.flush().map_err(failed)?;
    let queued = start.elapsed();
    let outcome = engine.outcome(update)?;
    Ok((StepTimes { update: backward_ended.elapsed(), queued }, outcome))
}

fn settle(device: &Device) -> Result<()> {
    device.sync().map_err(failed)
}

fn failed(error: impl Display) -> TrainError {
    TrainError::Crash(format!("the device has failed: {error}"))
}
