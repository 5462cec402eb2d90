//! `kiln bench`: measurements that compare things in one run, alternating, with medians.

mod beside;
mod checkpoint;
mod disk;
mod error;
mod gpu;
mod measure;
mod process;
mod step;
mod strategies;

use std::time::{Duration, Instant};

use burn::tensor::Device;
use kiln_model::Context;
use kiln_model::Key;
use kiln_model::decoder;
use kiln_model::layers::Block;
use kiln_shard::{AdamW, ShardError};

use crate::config::Config;
use crate::device;
use crate::sharded::ShardedDecoder;

pub use checkpoint::{CheckpointArgs, CheckpointTable};
pub use error::BenchError;
pub use gpu::{GpuArgs, Kernel, Said, StepPair, Table as GpuTable, Work};
pub use step::{StepArgs, StepReport};
pub use strategies::{StrategiesOptions, StrategiesTable, StrategyRow, strategies};

/// Preset 10m with a small batch.
fn default_config() -> Config {
    let mut config = Config::default();
    config.model.preset = Some("10m".to_owned());
    config.train.global_batch = 4;
    config.train.micro_batch = 1.into();
    config
}

/// The most steps or rounds that are measured.
const MAX_COUNT: usize = 1_000_000;

/// Fails if one of these numbers of steps or rounds, each with its flag, makes no sense.
fn check_counts(counts: &[(&'static str, usize)]) -> Result<(), BenchError> {
    match counts.iter().find(|(_, count)| !(1..=MAX_COUNT).contains(count)) {
        Some((argument, _)) => Err(BenchError::Count { argument, most: MAX_COUNT }),
        None => Ok(()),
    }
}

/// One optimizer step on made-up tokens; returns the time that its update took.
fn step(
    config: &Config,
    model: &ShardedDecoder<Block>,
    device: &Device,
    step: u64,
) -> Result<Duration, ShardError> {
    let engine = model.engine();
    let training = device.clone().autodiff();
    let rows = config.micro_batch();
    let seq_len = config.data.seq_len;
    let micro_batches = config.train.global_batch / config.train.ranks / rows;
    let scale = 1.0 / (config.train.global_batch * seq_len) as f64;
    let vocabulary = engine.layout().groups[0].parameters[0].shape[0] as u64;
    engine.begin_step();
    for index in 0..micro_batches {
        let key = Key::new(step).fork_index((engine.world().rank() * micro_batches + index) as u64);
        let ids = |offset: u64| -> Vec<i32> {
            (0..(rows * seq_len) as u64).map(|i| (key.at(i + offset) % vocabulary) as i32).collect()
        };
        let inputs = device::tokens(ids(0), rows, seq_len, &training);
        let targets = device::tokens(ids(1), rows, seq_len, &training);
        let pass = model.pass(&training);
        let loss = decoder::loss(&pass, inputs, targets, scale, &Context::evaluation());
        engine.backward(loss, index + 1 == micro_batches)?;
    }
    let start = Instant::now();
    let update = engine.update(&AdamW::default(), config.optim.lr, config.optim.grad_clip)?;
    engine.outcome(update)?;
    Ok(start.elapsed())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => 0.0,
        odd if odd % 2 == 1 => values[middle],
        _ => 0.5 * (values[middle - 1] + values[middle]),
    }
}
