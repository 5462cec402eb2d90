mod sweep;

use std::path::PathBuf;

use burn::module::Module;
use clap::Args;
use kiln_model::{Decoder, Key};

use crate::error::{CommandError, Result};
use kiln_config::device::{self, DataSheet, Memory};
use kiln_config::links::Links;
use kiln_config::{self as config, Backend, ByteSize, Choice, CommBackend, Config, Precision};
use kiln_plan::{Cores, Hardware, MARGIN, PlanReport, Planned, Target, advise, divisor, recommend};
use kiln_preflight::bench::share_of_percent;
use kiln_preflight::calibrated;
use kiln_train::registry::Registry;
use kiln_train::run;

/// Default memory bandwidth of a machine for each rank's core, in bytes per second.
const HOST_BANDWIDTH: f64 = 8e9;
/// Share of the FLOP/s of a large matrix product that the products of a model reach on a CPU.
const HOST_PRODUCTS: f64 = 0.8;

const GPUS_PER_NODE: usize = 8;

/// Arguments of `kiln plan`.
#[derive(Args)]
pub(crate) struct PlanArgs {
    /// Configuration file.
    config: PathBuf,
    /// Number of ranks [default: train.ranks].
    #[arg(long)]
    ranks: Option<usize>,
    /// Number of machines [default: one per 8 GPUs].
    #[arg(long)]
    nodes: Option<usize>,
    /// On the CPU: plan for ranks as processes, as with `kiln launch`, instead of threads.
    #[arg(long, conflicts_with_all = ["gpu", "memory"])]
    processes: bool,
    /// GPU model of each rank, such as h100, h200, a100-80 or rtx4090 [default: the CPU of this machine].
    #[arg(long, value_name = "NAME", conflicts_with = "memory")]
    gpu: Option<String>,
    /// GPU memory per rank, such as 46GiB.
    #[arg(long, value_name = "SIZE")]
    memory: Option<ByteSize>,
    /// Matrix product throughput per rank in TFLOP/s.
    #[arg(long, value_name = "TFLOPS")]
    flops: Option<f64>,
    /// Memory bandwidth per rank in GB/s.
    #[arg(long, value_name = "GB/S")]
    bandwidth: Option<f64>,
    /// Links measured by `kiln bench network --out FILE`.
    #[arg(long, value_name = "FILE")]
    network: Option<PathBuf>,
    /// Percentage of memory that the recommendation must leave free.
    #[arg(long, value_name = "PERCENT", default_value_t = 100.0 * MARGIN)]
    margin: f64,
    /// On the CPU: measure matrix products and two blocks of the model first, to predict the step time.
    #[arg(long, conflicts_with = "flops")]
    calibrate: bool,
    /// Override a configuration value; may be repeated.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    overrides: Vec<String>,
    /// Print JSON instead of a table.
    #[arg(long)]
    json: bool,
    /// Show how the best strategy scales at a fixed number of sequences per rank, such as ranks=8..4096.
    #[arg(long, value_name = "ranks=A..B", value_parser = sweep::parse)]
    sweep: Option<sweep::Range>,
    /// SVG file to draw the sweep to.
    #[arg(long, value_name = "FILE.svg", requires = "sweep")]
    svg: Option<PathBuf>,
}

impl PlanArgs {
    pub(crate) fn run(self, registry: &Registry) -> Result<String> {
        let mut config = config::load(&self.config, &self.overrides)?;
        let first = self.sweep.map(|range| range.first());
        config.train.ranks = self.ranks.or(first).unwrap_or(config.train.ranks);
        if config.train.ranks == 0 {
            return Err(CommandError::usage("the number of ranks is missing or 0: give --ranks N"));
        }
        let on_gpu = self.gpu.is_some() || self.memory.is_some();
        if config.precision.compute == Choice::Auto {
            let precision = if on_gpu { Precision::Bf16 } else { device::cpu_defaults().precision };
            config.precision.compute = Choice::Is(precision);
        }
        config.device.backend = if on_gpu { Backend::Auto } else { Backend::Cpu };
        let ranks = config.train.ranks;
        let changed = share_batch(&mut config);
        // The plan covers all strategies, so the settings for one of them are not checked.
        let mut checked = config.clone();
        (checked.shard.strategy, checked.shard.shard_size) = Default::default();
        if checked.data.path.as_os_str().is_empty() {
            // No tokens are read: a configuration without data is complete.
            checked.data.path = "unused".into();
        }
        checked.validate()?;
        let model = run::model_of_run(&config, registry.layers())?;
        model.validate().map_err(|error| CommandError::usage(error.to_string()))?;
        let decoder = Decoder::new(registry.layers(), &model, Key::new(0), &device::plain())?;
        let optimizer = registry.optimizers().make(&config.optim)?;
        let mut target = self.target(&config)?;
        if self.calibrate {
            checked.validate_threads()?;
            target.hardware = calibrated(&config, &model, &optimizer, registry, &target)?;
        }
        let target = &target;
        let planned =
            Planned { config: &config, model: &model, decoder: &decoder, optimizer: &optimizer, target };
        if let Some(range) = self.sweep {
            let per_node = self.nodes.map_or(GPUS_PER_NODE, |_| target.ranks_per_node());
            return sweep::run(&planned, range, per_node, self.svg.as_deref(), self.json);
        }
        let rows = planned.rows();
        let name = config.model.preset.clone().unwrap_or_else(|| "the model".to_owned());
        let tokens_per_step = config.train.global_batch.saturating_mul(config.data.seq_len);
        let undescribed = planned.undescribed();
        let recommended = recommend(&rows, &name, target);
        let report = PlanReport {
            undescribed,
            parameters: decoder.num_params(),
            vocab_size: model.vocab_size,
            ranks,
            nodes: target.nodes,
            device: target.describe(),
            memory_bytes: target.memory,
            margin: target.margin,
            tokens_per_step,
            tokens: (tokens_per_step as u64).saturating_mul(config.train.steps),
            changed,
            shard_size: config.shard.shard_size,
            accumulate: advise(&planned, &rows, recommended.as_ref()),
            recommended,
            rows,
        };
        Ok(if self.json { report.to_json() } else { report.to_text() })
    }
}

impl PlanArgs {
    fn target(&self, config: &Config) -> Result<Target> {
        let ranks = config.train.ranks;
        let (flops, bandwidth) = (self.flops.map(|tflops| tflops * 1e12), self.bandwidth.map(|gb| gb * 1e9));
        for (flag, value) in [("--flops", flops), ("--bandwidth", bandwidth)] {
            if value.is_some_and(|value| !value.is_finite() || value <= 0.0) {
                return Err(CommandError::usage(format!("{flag} must be more than 0")));
            }
        }
        let margin = share_of_percent(self.margin)?;
        let on_host = self.gpu.is_none() && self.memory.is_none();
        let nodes = self.nodes.unwrap_or(if on_host { 1 } else { ranks.div_ceil(GPUS_PER_NODE) });
        if nodes == 0 || !ranks.is_multiple_of(nodes) {
            return Err(CommandError::usage(format!(
                "{ranks} ranks cannot be spread evenly over {nodes} machines: set --nodes"
            )));
        }
        let (hardware, memory) = match (&self.gpu, self.memory) {
            (Some(name), _) => {
                let sheet = *DataSheet::named(name).ok_or_else(|| {
                    let known: Vec<_> = DataSheet::names().collect();
                    CommandError::usage(format!(
                        "--gpu {name} is not known: use one of {}, or set --memory, --flops and --bandwidth",
                        known.join(", ")
                    ))
                })?;
                (Hardware::Gpu(sheet.with_speed(flops, bandwidth)), Some(sheet.memory()))
            }
            (None, Some(memory)) => (Hardware::Unknown { flops, bandwidth }, Some(memory.0)),
            (None, None) => {
                let here = ranks / nodes;
                let cores = flops.map(|flops| Cores {
                    flops: flops * HOST_PRODUCTS * here as f64,
                    bandwidth: bandwidth
                        .map_or(HOST_BANDWIDTH * here.min(device::cores()) as f64, |own| own * here as f64),
                });
                let machine = Memory::for_machine().map(|memory| memory.total);
                (Hardware::Cpu(cores), config.device.memory.map(|size| size.0).or(machine))
            }
        };
        let share = config.device.memory_fraction.unwrap_or(1.0);
        let memory = memory.map(|memory| (memory as f64 * share) as u64);
        let links = self.network.as_deref().map(Links::read).transpose()?.unwrap_or_default();
        let backend = match config.comm.backend {
            _ if !on_host => "nccl",
            CommBackend::Mpi => "mpi",
            CommBackend::Tcp => "tcp",
            // Ranks that are threads all run on one machine.
            _ if self.processes || nodes > 1 => "tcp",
            _ => "local",
        };
        Ok(Target { ranks, nodes, hardware, memory, margin, links, backend })
    }
}

/// Changes a batch that the ranks of `config` cannot share evenly; returns the changed settings.
fn share_batch(config: &mut Config) -> Vec<String> {
    let (ranks, train) = (config.train.ranks, &mut config.train);
    let mut changed = Vec::new();
    if !train.global_batch.is_multiple_of(ranks) {
        train.global_batch = train.global_batch.next_multiple_of(ranks);
        changed.push(format!("train.global_batch={}", train.global_batch));
    }
    let sequences = train.global_batch / ranks;
    if let Choice::Is(micro_batch) = train.micro_batch
        && micro_batch > 0
        && !sequences.is_multiple_of(micro_batch)
    {
        let largest = divisor(sequences, micro_batch);
        train.micro_batch = Choice::Is(largest);
        changed.push(format!("train.micro_batch={largest}"));
    }
    changed
}
