//! `kiln bench strategies`: compares the sharding strategies on the same work, in one run.

use std::path::PathBuf;

use clap::Args;
use kiln_model::decoder::Decoder;
use kiln_model::{Key, ModelConfig};
use kiln_observe::report::{Report, check_place};
use kiln_shard::Strategy;
use serde::Serialize;

use super::rounds::{Rounds, StrategyRow, prepare};
use super::{check_counts, default_config, unknown_ranks};
use kiln_config::device;
use kiln_config::{self as config, Config};
use kiln_launch::place::{self, RankEnv, Role};
use kiln_sys::words::number_of;
use kiln_train::error::{Result, TrainError};
use kiln_train::launch;
use kiln_train::process::output::{eprint_line, print_line};
use kiln_train::registry::Registry;
use kiln_train::run;
use kiln_train::version::version;
use kiln_train::world::Ranks;

/// Arguments of `kiln bench strategies`.
#[derive(Args)]
pub struct StrategiesArgs {
    /// Configuration whose model and batch to use [default: preset 10m].
    config: Option<PathBuf>,
    /// The earlier spelling of CONFIG.
    #[arg(long = "config", value_name = "CONFIG", hide = true, conflicts_with = "config")]
    config_flag: Option<PathBuf>,
    /// Number of ranks, as threads of this process; not needed under a launcher, which starts them as processes.
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
    /// Also write the page report.html into this folder, which is new or empty.
    #[arg(long, value_name = "DIR")]
    report: Option<PathBuf>,
}

impl StrategiesArgs {
    /// Measures as one rank, or launches the ranks of this node. Returns the exit code.
    pub fn run(self, registry: &Registry) -> Result<u8> {
        let place = match place::find_here(&place::Flags::default())? {
            Role::Node(node) => return Ok(launch::run_node(node)?),
            Role::Rank(place) => Some(place),
            Role::Alone(_) => None,
        };
        let is_first = place.as_ref().is_none_or(|place| place.rank == 0);
        if let Some(report) = self.report.as_ref().filter(|_| is_first) {
            check_place(report, "--report").map_err(|error| TrainError::usage(error.to_string()))?;
        }
        let config = self.config.or(self.config_flag).map(|path| config::load(&path, &[])).transpose()?;
        let StrategiesArgs { ranks, steps, rounds, .. } = self;
        let registry = registry.clone();
        let options = StrategiesOptions { config, ranks, place, registry, steps, rounds };
        let table = strategies(&options)?;
        if is_first {
            print_line(&if self.json { table.to_json() } else { table.to_text() });
            if let Some(place) = &self.report {
                let report = Report::from_strategies(&table.for_report(&options), version());
                let written = report.and_then(|report| report.write(place, "--report"));
                written.map_err(|error| TrainError::usage(error.to_string()))?;
                let place = format!("the report is in {}", place.join("report.html").display());
                if self.json { eprint_line(&place) } else { print_line(&format!("\n{place}")) }
            }
        }
        Ok(0)
    }
}

/// Options of a measurement.
#[derive(Clone, Debug)]
pub struct StrategiesOptions {
    /// Model, batch and policy; preset 10m with a small batch by default.
    pub config: Option<Config>,
    /// Number of ranks, if they are threads; a launcher determines the number of processes.
    pub ranks: Option<usize>,
    /// The rank of this process, if ranks are processes.
    pub place: Option<RankEnv>,
    /// The layers, losses and optimizers to choose from.
    pub registry: Registry,
    /// Steps measured per strategy and round, after one warm-up step.
    pub steps: usize,
    /// Number of rounds.
    pub rounds: usize,
}

/// The figures of all strategies, and what was measured.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StrategiesTable {
    /// The trained model.
    pub model: ModelConfig,
    /// Number of parameters.
    pub parameters: usize,
    /// Number of ranks.
    pub ranks: usize,
    /// The device that computed.
    #[serde(skip)]
    pub device: String,
    /// Seed of the weights, and compute dtype.
    #[serde(skip)]
    pub settled: (u64, String),
    /// Sequences per step.
    pub global_batch: usize,
    /// Tokens per sequence.
    pub seq_len: usize,
    /// One row per strategy.
    pub rows: Vec<StrategyRow>,
}

/// Measures all strategies. Under a launcher, every rank calls this function and gets its own figures.
pub fn strategies(options: &StrategiesOptions) -> Result<StrategiesTable> {
    let mut config = options.config.clone().unwrap_or_else(default_config);
    let place = options.place.as_ref();
    if place.is_none() && options.ranks.is_none() {
        return Err(unknown_ranks());
    }
    // All strategies are measured, so the configuration must not be checked against the settings for one of them.
    let shard_size = config.shard.shard_size.take();
    config.shard.strategy = Strategy::default();
    check_counts(&[("--steps", options.steps), ("--rounds", options.rounds)])?;
    let (config, model, selected) = prepare(config, options.ranks, &options.registry, place)?;
    let layers = options.registry.layers();
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
    let StrategiesOptions { registry, steps, rounds, .. } = options;
    let identity = format!("{} strategies {steps} {rounds} {config:?}", env!("CARGO_PKG_VERSION"));
    let ranks = Ranks::meet(&config, place, &identity, &selected)?;
    let ways = Strategy::ALL.map(|strategy| {
        let mut way = config.clone();
        way.shard.shard_size = shard_size.filter(|_| strategy.is_hybrid());
        way.shard.strategy = strategy;
        way
    });
    let measured = Rounds { model: &model, registry, selected: &selected, ranks: &ranks, steps: *steps };
    let rows = measured.measure(&ways, *rounds)?;
    Ok(StrategiesTable {
        ranks: config.train.ranks,
        device: selected.name(),
        settled: (config.train.seed, config.precision.compute().to_string()),
        global_batch: config.train.global_batch,
        seq_len: config.data.seq_len,
        parameters: Decoder::count_parameters(layers, &model)?,
        rows,
        model,
    })
}

impl StrategiesTable {
    fn for_report(&self, options: &StrategiesOptions) -> impl Serialize {
        let are = if options.place.is_some() { "processes" } else { "threads of one process" };
        let words: Vec<_> = std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
        serde_json::json!({
            "parameters": self.parameters,
            "ranks": self.ranks,
            "global_batch": self.global_batch,
            "seq_len": self.seq_len,
            "steps": options.steps,
            "rounds": options.rounds,
            "facts": {
                "Program": version(),
                "Device": self.device,
                "Seed": self.settled.0.to_string(),
                "Ranks": format!("{}, {are}", self.ranks),
                "Compute dtype": self.settled.1,
            },
            "command": words,
            "rows": self.rows,
        })
    }

    /// Returns the table as JSON.
    pub fn to_json(&self) -> String {
        // Serializing numbers and strings cannot fail.
        serde_json::to_string_pretty(self).unwrap_or_default()
    }

    /// Returns the table as text.
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
                row.strategy.clone(),
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
            "relative: tok/s divided by that of FULL_SHARD in the same round, median of the rounds; the \
             ratio of the medians may differ",
        );
        let mesh = |strategy: Strategy| {
            self.rows.iter().find(|row| row.strategy == strategy.to_string()).map(|row| row.mesh.as_str())
        };
        if self.ranks > 1 && mesh(Strategy::HybridShard) == mesh(Strategy::FullShard) {
            text.push_str(
                "\nHybrids have one group per machine, which is all ranks here, so they work like FULL_SHARD \
                 and SHARD_GRAD_OP; set shard.shard_size in a configuration to form smaller groups",
            );
        }
        text
    }
}
