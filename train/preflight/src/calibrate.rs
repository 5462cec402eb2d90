//! Calibration: measures how fast the cores of this machine train a small part of a model.

use std::time::Instant;

use burn::tensor::Device;
use kiln_model::{Decoder, Key, ModelConfig};
use kiln_shard::ranks::run_ranks;
use kiln_shard::{EngineBuilder, Optimizer, Strategy};

use crate::bench::{median, step};
use kiln_checkpoint::sharded::ShardedDecoder;
use kiln_config::Config;
use kiln_config::device::{ResolvedDevice, cores, threads_per_rank};
use kiln_plan::{Cores, Gathers, Hardware, RankShape, Speed, Target};
use kiln_train::error::{Result, TrainError};
use kiln_train::passes::RunLoss;
use kiln_train::process::output::ProgressLine;
use kiln_train::registry::Registry;

const BLOCKS: usize = 2;
const STEPS: u64 = 5;
/// Seconds of work before a measurement counts: idle cores are up to twice as slow for a second.
const WARM_UP: f64 = 2.0;
/// First guess of a core's bytes per second outside of matrix products; the measurement corrects it.
const BANDWIDTH: f64 = 6e9;

/// Measures the cores by training the first blocks of `model` on as many ranks as one machine of `target` has.
pub fn calibrated(
    config: &Config,
    model: &ModelConfig,
    optimizer: &Optimizer,
    registry: &Registry,
    target: &Target,
) -> Result<Hardware> {
    if !target.on_host() {
        return Err(TrainError::usage(
            "--calibrate measures the CPU of this machine: remove --gpu and --memory",
        ));
    }
    let ranks = target.ranks_per_node();
    let threads = threads_per_rank(&config.device, ranks);
    let mut config = config.clone();
    (config.train.ranks, config.train.global_batch) = (ranks, ranks * config.micro_batch());
    let resolved = ResolvedDevice::new(&config, registry.layers(), None)?;
    let model = ModelConfig { layers: model.layers.min(BLOCKS), ..model.clone() };
    // This strategy needs no `shard.shard_size`, which the file may not set.
    (config.shard.strategy, config.shard.shard_size) = (Strategy::FullShard, None);
    let make = |device: &Device| Decoder::new(registry.layers(), &model, Key::new(0), device);
    let loss = registry.losses().make(&config.loss, model.vocab_size)?;
    let _line = ProgressLine::on_stderr("calibrating", "training a part of the model");
    let start = Instant::now();
    let (peak, measured) = loop {
        let warm = start.elapsed().as_secs_f64() >= WARM_UP;
        let failed = TrainError::threads("threads that measure the peak of this machine");
        let peak = resolved.peak(config.precision.compute(), None, ranks, threads).map_err(failed)?;
        let seconds = run_ranks(ranks, threads, |world| -> Result<f64> {
            let device = Device::flex();
            let loss = RunLoss::load(loss.clone(), registry.layers(), &config, &world, &device)?;
            let builder = EngineBuilder::new(world, config.policy(), None)?.freeze(config.frozen());
            let sharded = ShardedDecoder::new(make(&device)?, builder.optimizer(optimizer.clone()))?;
            let mut times = Vec::new();
            for number in 0..=STEPS {
                let start = Instant::now();
                step(&config, &sharded, &device, &loss, number)?;
                times.push(start.elapsed().as_secs_f64());
            }
            Ok(median(times.split_off(1)))
        })?;
        if warm {
            break (peak, median(seconds));
        }
    };
    let used = (ranks * threads).min(cores());
    let cores = Cores { flops: peak.flops(), bandwidth: BANDWIDTH * used as f64 };
    let decoder = make(&Device::flex())?;
    let shape = RankShape::from_config(&config, &model, &decoder, optimizer, Gathers::Shared, true);
    let shape = shape.map_err(|error| TrainError::usage(error.to_string()))?;
    let hardware = Hardware::Cpu(Some(cores));
    let target = Target { ranks, nodes: 1, hardware, backend: "local", ..target.clone() };
    let speed = target.speed(&shape.mesh, config.precision.compute()).unwrap_or(Speed::INSTANT);
    let planned = shape.step(&speed).seconds;
    let factor = planned / measured;
    Ok(Hardware::Cpu(Some(Cores { flops: factor * cores.flops, bandwidth: factor * cores.bandwidth })))
}
