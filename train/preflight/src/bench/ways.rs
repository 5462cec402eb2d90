//! The ways to run a configuration that `kiln tune` tries: those that fit, ordered by their planned speed.

use std::cmp::Ordering;

use kiln_model::{Decoder, Key, ModelConfig};
use kiln_shard::{Optimizer, Recompute, Strategy};
use serde::{Deserialize, Serialize};

use kiln_config::device::{self, Memory, ResolvedDevice};
use kiln_config::links::Links;
use kiln_config::{Choice, Config, Precision};
use kiln_launch::place::RankEnv;
use kiln_plan::{Hardware, Planned, Target};
use kiln_train::error::Result;
use kiln_train::registry::Registry;
use kiln_train::run;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Way {
    pub(super) strategy: Strategy,
    shard_size: Option<usize>,
    pub(super) recompute: Recompute,
    pub(super) offload: bool,
    pub(super) micro_batch: usize,
    /// True if the configuration already runs this way.
    pub(super) configured: bool,
    pub(super) planned_peak_bytes: u64,
    pub(super) planned_step_s: Option<f64>,
}

impl Way {
    fn from_config(config: &Config) -> Self {
        Way {
            strategy: config.shard.strategy,
            shard_size: config.shard.shard_size,
            recompute: config.shard.recompute(),
            offload: config.shard.offload,
            micro_batch: config.micro_batch(),
            configured: false,
            planned_peak_bytes: 0,
            planned_step_s: None,
        }
    }

    pub(super) fn apply(&self, config: &Config) -> Config {
        let mut config = config.clone();
        (config.shard.strategy, config.shard.shard_size) = (self.strategy, self.shard_size);
        (config.shard.recompute, config.shard.offload) = (self.recompute.into(), self.offload);
        config.train.micro_batch = Choice::Is(self.micro_batch);
        config
    }

    /// Returns whether both ways are the same, apart from their planned figures.
    pub(super) fn is_same(&self, other: &Way) -> bool {
        let what = |way: &Way| (way.strategy, way.shard_size, way.recompute, way.offload, way.micro_batch);
        what(self) == what(other)
    }

    /// Orders the configuration's own way first, then by planned speed, least work and largest micro-batch.
    fn compare(&self, other: &Way) -> Ordering {
        let by_time = match (self.planned_step_s, other.planned_step_s) {
            (Some(one), Some(other)) => one.total_cmp(&other),
            _ => Ordering::Equal,
        };
        let rule = |way: &Way| match way.recompute {
            Recompute::None => (way.offload, 0),
            Recompute::Selective => (way.offload, 1),
            Recompute::Every(_) => (way.offload, 2),
            Recompute::Block => (way.offload, 3),
        };
        let own = other.configured.cmp(&self.configured);
        own.then(by_time).then(rule(self).cmp(&rule(other))).then(other.micro_batch.cmp(&self.micro_batch))
    }
}

pub(super) struct Tried<'a> {
    pub(super) config: &'a Config,
    pub(super) model: &'a ModelConfig,
    pub(super) registry: &'a Registry,
    pub(super) selected: &'a ResolvedDevice,
    pub(super) place: Option<&'a RankEnv>,
    pub(super) margin: f64,
}

impl Tried<'_> {
    /// Returns all ways that fit into this process's free memory, in the order in which to try them.
    pub(super) fn ways(&self) -> Result<Vec<Way>> {
        let Tried { config, model, registry, .. } = *self;
        let decoder = Decoder::new(registry.layers(), model, Key::new(0), &device::plain())?;
        let optimizer = registry.optimizers().make(&config.optim)?;
        let target = self.target();
        // Without a configured size, a group is the ranks of one machine.
        let mut planned_config = config.clone();
        let of_machine = (target.nodes > 1).then(|| target.ranks_per_node());
        planned_config.shard.shard_size = config.shard.shard_size.or(of_machine);
        let planned = Planned {
            config: &planned_config,
            model,
            decoder: &decoder,
            optimizer: &optimizer,
            target: &target,
        };
        let sequences = (config.train.global_batch / config.train.ranks.max(1)).max(1);
        let mut ways = vec![Way { configured: true, ..Way::from_config(config) }];
        for row in planned.rows() {
            let most = row.largest_micro_batch.unwrap_or(config.micro_batch());
            for micro_batch in [most, config.micro_batch(), most / 2] {
                let way = Way {
                    strategy: row.strategy,
                    shard_size: config.shard.shard_size.filter(|_| row.strategy.is_hybrid()),
                    recompute: row.recompute,
                    offload: row.offload,
                    micro_batch,
                    ..Way::from_config(config)
                };
                let divides = micro_batch > 0 && sequences.is_multiple_of(micro_batch);
                if divides && !ways.iter().any(|known| known.is_same(&way)) {
                    ways.push(way);
                }
            }
        }
        let mut fitting: Vec<_> =
            ways.into_iter().filter_map(|way| self.planned(way, &planned, &decoder, &optimizer)).collect();
        // A stable sort, so that equal ways stay in the order of strategies.
        fitting.sort_by(Way::compare);
        Ok(fitting)
    }

    fn planned(
        &self,
        way: Way,
        planned: &Planned<'_>,
        decoder: &Decoder,
        optimizer: &Optimizer,
    ) -> Option<Way> {
        if way.offload && self.config.precision.compute() == Precision::F16 {
            // f16 excludes offload: the loss scale adapts on the GPU.
            return None;
        }
        let mut config = way.apply(self.config);
        run::memory_warnings(&config, self.model, decoder, optimizer, self.selected, self.place).ok()?;
        if way.strategy.is_hybrid() {
            let of_machine = planned.target.ranks_per_node();
            config.shard.shard_size.get_or_insert(of_machine);
        }
        let row = planned.row(config).filter(|row| row.fits != Some(false))?;
        Some(Way { planned_peak_bytes: row.peak_bytes, planned_step_s: row.step_s, ..way })
    }

    fn target(&self) -> Target {
        let Tried { config, selected, place, margin, .. } = *self;
        let ranks = config.train.ranks;
        let (hardware, free) = if selected.is_gpu() {
            let unknown = Hardware::Unknown { flops: None, bandwidth: None };
            (selected.data_sheet().map_or(unknown, Hardware::Gpu), selected.gpu_memory())
        } else {
            (Hardware::Cpu(None), Memory::for_machine())
        };
        let fraction = config.device.memory_fraction.unwrap_or(1.0);
        let share = |memory: Memory| memory.free.min((memory.total as f64 * fraction) as u64);
        Target {
            ranks,
            nodes: place.map_or(1, |place| ranks.div_ceil(place.local_world_size.max(1))),
            hardware,
            memory: config.device.memory.map(|size| size.0).or(free.map(share)),
            margin,
            links: Links::default(),
            backend: match place {
                _ if selected.is_gpu() => "nccl",
                Some(_) => "tcp",
                None => "local",
            },
        }
    }
}
