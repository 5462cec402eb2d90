//! Alternates between ways to train on the same work, so that changes in the machine's speed affect every way.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kiln_collectives::{Communicator, Operation, Phase};
use kiln_model::decoder::Decoder;
use kiln_model::{Key, ModelConfig};
use kiln_shard::{EngineBuilder, Policy, ShardError, memory};
use serde::Serialize;

use super::{median, settle, step};
use kiln_checkpoint::sharded::ShardedDecoder;
use kiln_config::Config;
use kiln_config::device::{self, ResolvedDevice};
use kiln_launch::place::RankEnv;
use kiln_train::error::Result;
use kiln_train::kernels;
use kiln_train::passes::RunLoss;
use kiln_train::process::output::ProgressLine;
use kiln_train::registry::Registry;
use kiln_train::run::{self, RunOptions};
use kiln_train::world::{self, Ranks};

/// Figures of one way to train. Counts and bytes are those of one rank and one step.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct StrategyRow {
    /// Name of the strategy.
    pub strategy: String,
    /// Arrangement of the ranks.
    pub mesh: String,
    /// Tokens per second of all ranks together, median over rounds.
    pub tokens_per_s: f64,
    /// Tokens per second of the slowest and the fastest round.
    pub tokens_per_s_range: (f64, f64),
    /// Ratio of `tokens_per_s` to that of the first strategy; median of the rounds' ratios.
    pub relative_speed: f64,
    /// Peak memory of a rank in bytes.
    pub peak_bytes: u64,
    /// Bytes that the rank sent.
    pub sent_bytes: u64,
    /// Number of gathers of weights.
    pub gathers: u64,
    /// Number of reductions of gradients.
    pub reductions: u64,
    /// Share of a step in which the rank waited for communication, median over rounds.
    pub wait_share: f64,
}

pub(super) struct Rounds<'a> {
    pub(super) model: &'a ModelConfig,
    pub(super) registry: &'a Registry,
    pub(super) selected: &'a ResolvedDevice,
    pub(super) ranks: &'a Ranks<'a>,
    pub(super) steps: usize,
}

/// Resolves `config` for a measurement on made-up tokens; `ranks` is as for [`world::ranks_of`].
///
/// # Errors
///
/// If the configuration cannot be trained on that many ranks.
pub fn prepare(
    mut config: Config,
    ranks: Option<usize>,
    registry: &Registry,
    place: Option<&RankEnv>,
) -> Result<(Config, ModelConfig, ResolvedDevice)> {
    let path = config.data.path.clone();
    if path.as_os_str().is_empty() {
        // Tokens are made up, so `data.path` may be missing.
        config.data.path = "unused".into();
    }
    let options = RunOptions { ranks, place: place.cloned(), ..RunOptions::default() };
    let mut config = run::with_ranks(config, &options)?;
    config.data.path = path;
    let model = run::model_of_run(&config, registry.layers())?;
    let selected = ResolvedDevice::new(&config, registry.layers(), place)?;
    config.settle(selected.defaults());
    let decoder = Decoder::new(registry.layers(), &model, Key::new(0), &device::plain())?;
    let optimizer = registry.optimizers().make(&config.optim)?;
    let recompute = run::settle_recompute(&config, &model, &decoder, &optimizer, &selected, place);
    config.shard.recompute = recompute.into();
    Ok((config, model, selected))
}

impl Rounds<'_> {
    pub(super) fn measure(&self, ways: &[Config], rounds: usize) -> Result<Vec<StrategyRow>> {
        if let Some(way) = ways.first() {
            let settle = |world: Arc<dyn Communicator>| {
                kernels::settle_on_rank(way, self.model, self.selected, &*world)
            };
            self.ranks.run(way, settle)?;
        }
        let line = self.ranks.has_first().then(|| ProgressLine::on_stderr("measuring", "the first round"));
        let all = rounds * ways.len();
        let mut measured: Vec<Vec<StrategyRow>> = Vec::new();
        for round in 0..rounds {
            let rows = ways.iter().enumerate().map(|(index, way)| {
                if let Some(line) = &line {
                    let what = format!("{}, round {} of {rounds}", way.shard.strategy, round + 1);
                    line.set(what, (round * ways.len() + index) as u64, all as u64);
                }
                self.measure_once(way)
            });
            measured.push(rows.collect::<Result<_>>()?);
        }
        let rows = (0..ways.len()).map(|index| {
            let column = |value: fn(&StrategyRow) -> f64| {
                median(measured.iter().map(|round| value(&round[index])).collect())
            };
            let ratios = measured.iter().map(|round| round[index].tokens_per_s / round[0].tokens_per_s);
            let speeds = || measured.iter().map(|round| round[index].tokens_per_s);
            StrategyRow {
                tokens_per_s: column(|row| row.tokens_per_s),
                tokens_per_s_range: (speeds().fold(f64::INFINITY, f64::min), speeds().fold(0.0, f64::max)),
                relative_speed: median(ratios.collect()),
                wait_share: column(|row| row.wait_share),
                ..measured[measured.len() - 1][index].clone()
            }
        });
        Ok(rows.collect())
    }

    fn measure_once(&self, config: &Config) -> Result<StrategyRow> {
        let Rounds { model, registry, steps, .. } = *self;
        let device = self.selected.device();
        let optimizer = registry.optimizers().make(&config.optim)?;
        let loss = registry.losses().make(&config.loss, model.vocab_size)?;
        let Policy { strategy, .. } = config.policy();
        let measured = self.ranks.run(config, |world| -> Result<StrategyRow> {
            let rank = world.rank();
            let shard_size = world::shard_size(strategy, config.shard.shard_size, &*world)?;
            memory::reset_peak(rank);
            let decoder = Decoder::new(registry.layers(), model, Key::new(config.train.seed), &device)?;
            let builder = EngineBuilder::new(world.clone(), config.policy(), shard_size)?
                .optimizer(optimizer.clone())
                .freeze(config.frozen());
            let model = ShardedDecoder::new(decoder, builder)?;
            let loss = RunLoss::load(loss.clone(), registry.layers(), config, &world, &device)?;
            step(config, &model, &device, &loss, 1)?;
            world.recorder().reset_totals();
            let waited = world.recorder().total_waited();
            settle(&device)?;
            let start = Instant::now();
            for index in 0..steps {
                step(config, &model, &device, &loss, 2 + index as u64)?;
            }
            settle(&device)?;
            let (elapsed, waited) = (start.elapsed(), world.recorder().total_waited() - waited);
            Ok(sample(config, &world, &model, elapsed, waited, steps)?)
        })?;
        // Frees unused memory, so that every way starts with an equally empty GPU.
        kiln_shard::release_unused(&device);
        Ok(measured)
    }
}

fn sample(
    config: &Config,
    world: &Arc<dyn Communicator>,
    model: &ShardedDecoder,
    elapsed: Duration,
    waited: Duration,
    steps: usize,
) -> Result<StrategyRow, ShardError> {
    let engine = model.engine();
    let recorder = world.recorder();
    let sent_bytes = recorder.bytes_sent() / steps as u64;
    let count = |operation, phase| recorder.count(operation, Some(phase)) / steps as u64;
    let gathers = count(Operation::AllGather, Phase::Forward) + count(Operation::AllGather, Phase::Backward);
    // Under NO_SHARD, all-reduces alone reduce; under the hybrids, each follows a reduce-scatter of the same module.
    let reductions =
        count(Operation::ReduceScatter, Phase::Backward).max(count(Operation::AllReduce, Phase::Backward));
    let tokens = (steps * config.train.global_batch * config.data.seq_len) as f64;
    let mut peaks = vec![0.0; world.world_size()];
    peaks[world.rank()] = engine.peak_bytes() as f64;
    let peaks = engine.sum_over_ranks("peak", &peaks)?;
    Ok(StrategyRow {
        strategy: engine.policy().strategy.to_string(),
        mesh: engine.mesh().to_string(),
        tokens_per_s: tokens / elapsed.as_secs_f64(),
        tokens_per_s_range: (0.0, 0.0),
        relative_speed: 1.0,
        peak_bytes: peaks.into_iter().fold(0.0, f64::max) as u64,
        sent_bytes,
        gathers,
        reductions,
        wait_share: waited.as_secs_f64() / elapsed.as_secs_f64(),
    })
}
