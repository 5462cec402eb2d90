//! `kiln bench strategies`: every sharding strategy on the same work, in one run.
//!
//! The strategies alternate round by round, so that a machine that speeds up or slows down does
//! so for all of them; the table shows medians over the rounds.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::tensor::Device;
use clap::Args;
use kiln_collectives::{Communicator, Operation, Phase};
use kiln_model::decoder::Decoder;
use kiln_model::{Key, ModelConfig};
use kiln_shard::{EngineBuilder, Policy, ShardError, Strategy, memory};
use serde::Serialize;

use super::{check_counts, default_config, median, settle, step};
use crate::config::{self, Config};
use crate::device::{self, ResolvedDevice};
use crate::error::{Result, TrainError};
use crate::launch;
use crate::place::{self, RankEnv, Role};
use crate::process::output::say;
use crate::registry::Registry;
use crate::run;
use crate::sharded::ShardedDecoder;
use crate::words::number_of;
use crate::world::{self, Ranks};

/// Arguments of `kiln bench strategies`.
#[derive(Args)]
pub(crate) struct StrategiesArgs {
    /// Configuration whose model and batch to use [default: preset 10m].
    #[arg(long)]
    config: Option<PathBuf>,
    /// Ranks, as threads of this process; not needed under a launcher, which starts them as processes.
    #[arg(long)]
    ranks: Option<usize>,
    /// Steps measured per strategy and round.
    #[arg(long, default_value_t = 3)]
    steps: usize,
    /// Rounds; the strategies alternate, and medians are shown.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Print JSON instead of a table.
    #[arg(long)]
    json: bool,
}

impl StrategiesArgs {
    /// Measures, or starts the ranks of a node; returns the exit code.
    pub(crate) fn run(self, registry: &Registry) -> Result<u8> {
        let place = match place::find_here(&place::Flags::default())? {
            Role::Node(node) => return Ok(launch::run_node(node)?),
            Role::Rank(place) => Some(place),
            Role::Alone(_) => None,
        };
        let speaks = place.as_ref().is_none_or(|place| place.rank == 0);
        let config = self.config.map(|path| config::load(&path, &[])).transpose()?;
        let StrategiesArgs { ranks, steps, rounds, .. } = self;
        let registry = registry.clone();
        let options = StrategiesOptions { config, ranks, place, registry, steps, rounds };
        let table = strategies(&options)?;
        if speaks {
            say(&if self.json { table.to_json() } else { table.to_text() });
        }
        Ok(0)
    }
}

/// What to measure.
#[derive(Clone, Debug)]
pub struct StrategiesOptions {
    /// Model, batch and policy; preset 10m with a small batch if there is none.
    pub config: Option<Config>,
    /// Ranks. Needed if they are threads; else as many as the launcher has started.
    pub ranks: Option<usize>,
    /// The rank that this process is, if ranks are processes.
    pub place: Option<RankEnv>,
    /// What the decoder can be made of, and what can update it.
    pub registry: Registry,
    /// Steps measured per strategy and round; one more warms up.
    pub steps: usize,
    /// Rounds.
    pub rounds: usize,
}

/// One strategy's figures; counts and bytes are per rank and optimizer step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StrategyRow {
    /// The strategy.
    pub strategy: Strategy,
    /// Arrangement of the ranks, replicate x shard.
    pub mesh: String,
    /// Tokens per second of all ranks together, median over rounds.
    pub tokens_per_s: f64,
    /// `tokens_per_s` over that of the first row, median of the ratios within rounds.
    pub relative_speed: f64,
    /// The most bytes a rank held.
    pub peak_bytes: u64,
    /// Bytes a rank sent.
    pub sent_bytes: u64,
    /// Gathers of weights.
    pub gathers: u64,
    /// Reductions of gradients.
    pub reductions: u64,
    /// Share of the step that a rank waited for communication, median over rounds.
    pub wait_share: f64,
}

/// The rows of all strategies.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StrategiesTable {
    /// What was trained.
    pub model: ModelConfig,
    /// Number of parameters.
    pub parameters: usize,
    /// Ranks.
    pub ranks: usize,
    /// Sequences per step.
    pub global_batch: usize,
    /// Tokens per sequence.
    pub seq_len: usize,
    /// One row per strategy.
    pub rows: Vec<StrategyRow>,
}

/// Measures all strategies. Of ranks that are processes, every one calls this; the figures are those of its
/// own, and rank 0's are the ones to show.
pub fn strategies(options: &StrategiesOptions) -> Result<StrategiesTable> {
    let mut config = options.config.clone().unwrap_or_else(default_config);
    let place = options.place.as_ref();
    if place.is_none() && options.ranks.is_none() {
        return Err(TrainError::usage(
            "how many ranks? Give --ranks N for threads of this process, or start processes with `kiln \
             launch`",
        ));
    }
    config.train.ranks = world::ranks_of(&config, place, options.ranks)?;
    // The strategies of the table decide; what the file says about one of them does not hold here.
    let shard_size = config.shard.shard_size.take();
    config.shard.strategy = Strategy::default();
    if config.data.path.as_os_str().is_empty() {
        // Tokens are made up; no data is read.
        config.data.path = "unused".into();
    }
    if place.is_some() { config.validate() } else { config.validate_threads() }?;
    check_counts(&[("--steps", options.steps), ("--rounds", options.rounds)])?;
    let model = config.model.resolve(Some(config.data.vocab_size)).map_err(TrainError::usage)?;
    let layers = options.registry.layers();
    let selected = ResolvedDevice::new(&config, layers, place)?;
    config.settle(selected.defaults());
    // The strategy that takes most.
    let mut replicated = config.clone();
    replicated.shard.strategy = Strategy::NoShard;
    let decoder = Decoder::new(layers, &model, Key::new(0), &device::plain())?;
    run::check_memory(
        &replicated,
        &model,
        &decoder,
        &options.registry.optimizers().make(&config.optim)?,
        &selected,
        place,
    )?;
    let device = selected.device();
    let StrategiesOptions { steps, rounds, .. } = options;
    let told = format!("{} strategies {steps} {rounds} {config:?}", env!("CARGO_PKG_VERSION"));
    let ranks = Ranks::meet(&config, place, &told, &selected)?;

    let mut rounds: Vec<Vec<StrategyRow>> = Vec::new();
    for _ in 0..options.rounds {
        let round: Result<Vec<_>, _> = Strategy::ALL
            .into_iter()
            .map(|strategy| measure(&config, options, &model, &device, &ranks, strategy, shard_size))
            .collect();
        rounds.push(round?);
    }
    let rows = Strategy::ALL.into_iter().enumerate().map(|(index, strategy)| {
        let column = |value: fn(&StrategyRow) -> f64| {
            median(rounds.iter().map(|round| value(&round[index])).collect())
        };
        let ratios = rounds.iter().map(|round| round[index].tokens_per_s / round[0].tokens_per_s);
        StrategyRow {
            strategy,
            tokens_per_s: column(|row| row.tokens_per_s),
            relative_speed: median(ratios.collect()),
            wait_share: column(|row| row.wait_share),
            ..rounds[rounds.len() - 1][index].clone()
        }
    });
    Ok(StrategiesTable {
        ranks: config.train.ranks,
        global_batch: config.train.global_batch,
        seq_len: config.data.seq_len,
        parameters: Decoder::count_parameters(layers, &model)?,
        rows: rows.collect(),
        model,
    })
}

fn measure(
    config: &Config,
    options: &StrategiesOptions,
    model: &ModelConfig,
    device: &Device,
    ranks: &Ranks<'_>,
    strategy: Strategy,
    shard_size: Option<usize>,
) -> Result<StrategyRow> {
    let StrategiesOptions { registry, steps, .. } = options;
    let optimizer = registry.optimizers().make(&config.optim)?;
    let loss = registry.losses().make(&config.loss, model.vocab_size)?;
    let policy = Policy { strategy, ..config.policy() };
    let measured = ranks.run(config, |world| -> Result<StrategyRow> {
        let rank = world.rank();
        // As in training: the size that the user names is that of the hybrids' groups.
        let shard_size = shard_size.filter(|_| strategy.is_hybrid());
        let shard_size = world::shard_size(strategy, shard_size, &*world)?;
        memory::reset_peak(rank);
        let decoder = Decoder::new(registry.layers(), model, Key::new(config.train.seed), device)?;
        let builder =
            EngineBuilder::new(world.clone(), policy.clone(), shard_size)?.optimizer(optimizer.clone());
        let model = ShardedDecoder::new(decoder, builder)?;
        step(config, &model, device, loss.as_ref(), 1)?;
        world.recorder().reset_totals();
        model.engine().take_waited();
        settle(device)?;
        let start = Instant::now();
        for index in 0..*steps {
            step(config, &model, device, loss.as_ref(), 2 + index as u64)?;
        }
        settle(device)?;
        Ok(sample(config, &world, &model, start.elapsed(), *steps)?)
    })?;
    // The next strategy starts with a GPU as empty as this one did.
    kiln_shard::release_unused(device);
    Ok(measured)
}

fn sample(
    config: &Config,
    world: &Arc<dyn Communicator>,
    model: &ShardedDecoder,
    elapsed: Duration,
    steps: usize,
) -> Result<StrategyRow, ShardError> {
    let engine = model.engine();
    let waited = engine.take_waited().as_secs_f64();
    let recorder = world.recorder();
    let sent_bytes = recorder.bytes_sent() / steps as u64;
    let count = |operation, phase| recorder.count(operation, Some(phase)) / steps as u64;
    let gathers = count(Operation::AllGather, Phase::Forward) + count(Operation::AllGather, Phase::Backward);
    // Under NO_SHARD the all-reduce is the reduction; under the hybrids it follows a
    // reduce-scatter of the same unit.
    let reductions =
        count(Operation::ReduceScatter, Phase::Backward).max(count(Operation::AllReduce, Phase::Backward));
    let tokens = (steps * config.train.global_batch * config.data.seq_len) as f64;
    let mut peaks = vec![0.0; world.world_size()];
    peaks[world.rank()] = engine.peak_bytes() as f64;
    let peaks = engine.sum_over_ranks("peak", &peaks)?;
    Ok(StrategyRow {
        strategy: engine.policy().strategy,
        mesh: engine.mesh().to_string(),
        tokens_per_s: tokens / elapsed.as_secs_f64(),
        relative_speed: 1.0,
        peak_bytes: peaks.into_iter().fold(0.0, f64::max) as u64,
        sent_bytes,
        gathers,
        reductions,
        wait_share: waited / elapsed.as_secs_f64(),
    })
}

impl StrategiesTable {
    /// The table as JSON.
    pub fn to_json(&self) -> String {
        // Numbers and strings only: this cannot fail.
        serde_json::to_string_pretty(self).unwrap_or_default()
    }

    /// The table for people.
    pub fn to_text(&self) -> String {
        let mut text = format!(
            "{:.2}M parameters, {}, {} x {} per step; per rank and step\n\
             {:<21} {:<23} {:>8} {:>9} {:>10} {:>10} {:>8} {:>11} {:>7}\n",
            self.parameters as f64 / 1e6,
            number_of(self.ranks, "rank"),
            number_of(self.global_batch, "sequence"),
            number_of(self.seq_len, "token"),
            "strategy",
            "mesh",
            "tok/s",
            "relative",
            "peak MB",
            "sent MB",
            "gathers",
            "reductions",
            "waits"
        );
        for row in &self.rows {
            text.push_str(&format!(
                "{:<21} {:<23} {:>8.0} {:>8.2}x {:>10.1} {:>10.1} {:>8} {:>11} {:>6.1}%\n",
                row.strategy.to_string(),
                row.mesh,
                row.tokens_per_s,
                row.relative_speed,
                row.peak_bytes as f64 / 1e6,
                row.sent_bytes as f64 / 1e6,
                row.gathers,
                row.reductions,
                row.wait_share * 100.0
            ));
        }
        text.push_str(
            "relative: tok/s over those of FULL_SHARD in the same round, the median of the rounds; the \
             medians of tok/s may have another ratio",
        );
        let mesh =
            |strategy| self.rows.iter().find(|row| row.strategy == strategy).map(|row| row.mesh.as_str());
        if self.ranks > 1 && mesh(Strategy::HybridShard) == mesh(Strategy::FullShard) {
            text.push_str(
                "\nHybrids have one group per machine, which is all ranks here, so they do what FULL_SHARD \
                 and SHARD_GRAD_OP do; shard.shard_size in a --config makes groups",
            );
        }
        text
    }
}
