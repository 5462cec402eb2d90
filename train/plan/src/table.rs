//! The ways to run a configuration, compared.

use std::collections::{BTreeMap, BTreeSet};

use kiln_model::meta::{ACTIVATIONS, GRADIENTS, LOGITS};
use kiln_model::{Decoder, ModelConfig};
use kiln_shard::{Accumulate, Optimizer, Recompute, Strategy};
use serde::Serialize;

use super::clock::{Axis, Speed};
use super::engine::{COMMUNICATION, GATHERED, Gathers, OPTIMIZER, WEIGHTS};
use super::memory::{PlannedStep, RankShape};
use super::target::{Target, beside_blocks};
use kiln_config::{Choice, Config, DeviceDefaults, Precision};

/// Label of the memory that a GPU's runtime keeps: partly filled pages, and the workspace of products.
const RUNTIME: &str = "runtime";
/// Label of the memory that a GPU's driver, its libraries and NCCL use.
const DRIVER: &str = "driver";

/// The input of a plan: a configuration and its model, without values.
pub struct Planned<'a> {
    /// The configuration.
    pub config: &'a Config,
    /// The model.
    pub model: &'a ModelConfig,
    /// The model's layers.
    pub decoder: &'a Decoder,
    /// The optimizer.
    pub optimizer: &'a Optimizer,
    /// The hardware and its ranks.
    pub target: &'a Target,
}

/// One way to run the configuration.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlanRow {
    /// The sharding strategy.
    pub strategy: Strategy,
    /// Arrangement of the ranks, replicate x shard.
    pub mesh: String,
    /// The parts that are recomputed in backward.
    pub recompute: Recompute,
    /// The form in which gradients of micro-batches accumulate.
    pub accumulate: Accumulate,
    /// True if state is in the memory of the host.
    pub offload: bool,
    /// Sequences per micro-batch.
    pub micro_batch: usize,
    /// Micro-batches per step.
    pub micro_batches: usize,
    /// The largest micro-batch that fits and leaves the margin free; 0 if none does, and `null` if the memory
    /// is unknown.
    pub largest_micro_batch: Option<usize>,
    /// Peak memory of a rank in bytes.
    pub peak_bytes: u64,
    /// Bytes at the peak, by owner.
    pub phases: BTreeMap<&'static str, u64>,
    /// Part of the step in which the peak occurs.
    pub moment: String,
    /// Bytes that a rank holds on the host while a GPU computes.
    pub host_bytes: u64,
    /// Bytes needed: of all ranks of a machine if they share its memory, else of one rank.
    pub needed_bytes: u64,
    /// True if the needed bytes fit; `null` if the memory is unknown.
    pub fits: Option<bool>,
    /// True if the row also leaves the margin free, as a recommendation must; `null` if the memory is unknown.
    pub leaves_margin: Option<bool>,
    /// Bytes that a rank sends per step.
    pub sent_bytes: u64,
    /// Bytes that a rank sends per step, by axis.
    pub sent_by_axis: BTreeMap<&'static str, u64>,
    /// Collectives per step.
    pub collectives: u64,
    /// Seconds per step, if the speed is known.
    pub step_s: Option<f64>,
    /// Seconds of each step that a rank waits for communication.
    pub waits_s: Option<f64>,
    /// Tokens per second of all ranks.
    pub tokens_per_s: Option<f64>,
    /// Ratio of the model's FLOP/s to the peak FLOP/s.
    pub mfu: Option<f64>,
    /// Duration of the whole run in seconds.
    pub run_s: Option<f64>,
}

impl Planned<'_> {
    /// Returns the strategies that differ from each other on these ranks.
    fn strategies(&self) -> Vec<Strategy> {
        let hybrids = self.shard_size().is_some_and(|size| size > 1 && size < self.target.ranks);
        Strategy::ALL.into_iter().filter(|strategy| hybrids || !strategy.is_hybrid()).collect()
    }

    /// Returns the group size of the hybrid strategies: the configured size, else the number of ranks per machine.
    pub(super) fn shard_size(&self) -> Option<usize> {
        let per_node = self.target.ranks_per_node();
        self.config.shard.shard_size.or((self.target.nodes > 1).then_some(per_node))
    }

    /// Returns the values of `shard.recompute` to compare: those without a number, and the configured one.
    fn recomputes(&self) -> Vec<Recompute> {
        let mut all = vec![Recompute::None, Recompute::Selective, Recompute::Block];
        let configured = self.config.shard.recompute();
        if !all.contains(&configured) {
            all.insert(2, configured);
        }
        all
    }

    /// Returns all rows, ordered by strategy, recomputation and offload. If no row fits with its micro-batch,
    /// appends rows with the largest micro-batches that fit: a larger micro-batch accumulates fewer gradients.
    pub fn rows(&self) -> Vec<PlanRow> {
        let (mut rows, mut refitted) = (Vec::new(), Vec::new());
        for mut config in self.configs() {
            let Some(row) = self.row(config.clone()) else { continue };
            if let Some(largest @ 1..) = row.largest_micro_batch {
                config.train.micro_batch = Choice::Is(largest);
                refitted.push(config);
            }
            rows.push(row);
        }
        if rows.iter().all(|row| row.leaves_margin == Some(false)) {
            rows.extend(refitted.into_iter().filter_map(|config| self.row(config)));
        }
        rows
    }

    /// Returns the configurations of the strategies, with and without recomputation and offload.
    fn configs(&self) -> Vec<Config> {
        // Under f16, state is always updated on the GPU, because the loss scale is there.
        let offloads = !self.target.on_host() && self.config.precision.compute() != Precision::F16;
        let offloads: &[bool] = if offloads { &[false, true] } else { &[false] };
        let mut configs = Vec::new();
        for strategy in self.strategies() {
            for recompute in self.recomputes() {
                for &offload in offloads {
                    let mut config = self.config.clone();
                    config.shard.strategy = strategy;
                    config.shard.shard_size = self.shard_size().filter(|_| strategy.is_hybrid());
                    (config.shard.recompute, config.shard.offload) = (recompute.into(), offload);
                    configs.push(config);
                }
            }
        }
        configs
    }

    /// Returns the row of `config`; `None` if its ranks cannot be arranged. An unset micro-batch becomes the
    /// largest that fits, but no larger than needed to keep the device busy.
    pub fn row(&self, mut config: Config) -> Option<PlanRow> {
        config.train.ranks = self.target.ranks;
        let sequences = (config.train.global_batch / self.target.ranks).max(1);
        let largest = self.target.usable().map(|memory| self.largest(&config, sequences, memory));
        if config.train.micro_batch == Choice::Auto {
            let wanted = match self.target.on_host() {
                true => config.micro_batch(),
                false => config.rows_of(DeviceDefaults::GPU_TOKENS),
            };
            let fits = largest.filter(|largest| *largest > 0).unwrap_or(wanted);
            config.train.micro_batch = Choice::Is(divisor(sequences, wanted.min(fits)));
        }
        let micro_batch = config.micro_batch();
        let shape = self.shape(&config)?;
        let precision = config.precision.compute();
        let speed = self.target.speed(&shape.mesh, precision);
        let step = shape.step(speed.as_ref().unwrap_or(&Speed::INSTANT));
        let needed = self.needed(&shape, &step);
        let tokens = (config.train.global_batch * config.data.seq_len) as f64;
        let step_s = speed.is_some().then_some(step.seconds);
        let flops = self.decoder.flops_per_token(config.data.seq_len) * tokens;
        let peak = self.target.peak_flops(precision);
        let mut phases: BTreeMap<_, _> = [
            ("weights", WEIGHTS),
            ("gradients", GRADIENTS),
            ("optimizer", OPTIMIZER),
            ("gathered", GATHERED),
            ("activations", ACTIVATIONS),
            ("logits", LOGITS),
            ("communication", COMMUNICATION),
        ]
        .map(|(name, owner)| (name, step.peak.of(owner)))
        .into();
        phases.insert(RUNTIME, step.kept());
        phases.insert(DRIVER, self.target.driver());
        let by_axis = [("shard", Axis::Shard), ("replicate", Axis::Replicate), ("world", Axis::World)];
        let sent_by_axis: BTreeMap<_, _> = by_axis.map(|(name, axis)| (name, step.sent(axis))).into();
        Some(PlanRow {
            strategy: config.shard.strategy,
            mesh: shape.mesh.to_string(),
            recompute: config.shard.recompute(),
            accumulate: config.shard.accumulate(),
            offload: config.shard.offload,
            micro_batch,
            micro_batches: shape.micro_batches,
            largest_micro_batch: largest,
            peak_bytes: self.peak_bytes(&step),
            phases,
            moment: step.peak.moment.clone(),
            host_bytes: step.offloaded.bytes,
            needed_bytes: needed,
            fits: self.target.memory.map(|memory| needed <= memory),
            leaves_margin: self.target.usable().map(|usable| needed <= usable),
            sent_bytes: sent_by_axis.values().fold(0, |sum, sent| sum.saturating_add(*sent)),
            sent_by_axis,
            collectives: step.calls.iter().map(|call| call.times).sum(),
            step_s,
            waits_s: speed.is_some().then_some(step.waited),
            tokens_per_s: step_s.map(|seconds| tokens / seconds),
            mfu: step_s.zip(peak).map(|(seconds, peak)| flops / (self.target.ranks as f64 * peak * seconds)),
            run_s: step_s.map(|seconds| seconds * config.train.steps as f64),
        })
    }

    /// Returns the layers that do not describe their memory.
    pub fn undescribed(&self) -> BTreeSet<&'static str> {
        let step = |config: Config| Some(self.shape(&config)?.step(&Speed::INSTANT));
        self.configs().into_iter().find_map(step).map(|step| step.undescribed).unwrap_or_default()
    }

    fn shape<'b>(&'b self, config: &'b Config) -> Option<RankShape<'b>> {
        let Planned { model, decoder, optimizer, target, .. } = *self;
        RankShape::from_config(config, model, decoder, optimizer, target.gathers(), target.on_host()).ok()
    }

    /// Returns the peak memory of a rank, including the runtime and the driver.
    fn peak_bytes(&self, step: &PlannedStep) -> u64 {
        step.peak.bytes.saturating_add(step.kept()).saturating_add(self.target.driver())
    }

    /// Returns the bytes that must fit into a GPU (those of its rank) or a machine (those of all its ranks).
    fn needed(&self, shape: &RankShape<'_>, step: &PlannedStep) -> u64 {
        let bytes = self.peak_bytes(step);
        if !self.target.on_host() {
            return bytes;
        }
        let ranks = self.target.ranks_per_node() as u64;
        // Threads of a shard group read one copy of the gathered weights.
        let gathered = step.peak.of(GATHERED);
        let (copies, processes) = match self.target.gathers() {
            Gathers::Shared => (shape.mesh.replicate_size() as u64, 1),
            Gathers::Pooled => (ranks, ranks),
        };
        let own = bytes.saturating_sub(gathered).saturating_mul(ranks);
        let counted = own.saturating_add(gathered.saturating_mul(copies));
        counted.saturating_add(beside_blocks(counted, processes))
    }

    /// Returns the largest micro-batch that divides the `sequences` of a rank and fits into `memory`; 0 if none
    /// fits.
    fn largest(&self, config: &Config, sequences: usize, memory: u64) -> usize {
        let fits = |micro_batch: usize| {
            let mut config = config.clone();
            config.train.micro_batch = Choice::Is(micro_batch);
            let Some(shape) = self.shape(&config) else { return false };
            self.needed(&shape, &shape.step(&Speed::INSTANT)) <= memory
        };
        // Fewer sequences may need more memory, because the gradient of earlier micro-batches is kept.
        let mut divisors = (1..=sequences.min(4096)).rev().filter(|size| sequences.is_multiple_of(*size));
        divisors.find(|size| fits(*size)).unwrap_or(0)
    }
}

/// Returns the largest divisor of `sequences` that is at most `most`.
pub fn divisor(sequences: usize, most: usize) -> usize {
    (1..=most.clamp(1, sequences)).rev().find(|size| sequences.is_multiple_of(*size)).unwrap_or(1)
}
