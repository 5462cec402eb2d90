//! A custom optimizer, with all commands of `kiln`:
//!
//!     cargo run --release --example own_optimizer -- train configs/quickstart.toml --set optim.kind=lion --set optim.lr=1e-4
//!     cargo run --release --example own_optimizer -- generate runs/quickstart --prompt "pub fn" --max-tokens 32

use std::process::ExitCode;

use kiln::config::ConfigError;
use kiln::optimizers::OptimizerInit;
use kiln::process::CountingAllocator;
use kiln::registry::Registry;
use kiln_shard::{Rule, Settings, ShardRun, UpdateStep};
use serde::Deserialize;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Lion (Chen et al., 2023): steps by the learning rate in the direction of the sign of a momentum.
#[derive(Debug)]
struct Lion {
    settings: LionSettings,
    weight_decay: f64,
}

/// The keys of `[optim.extra]`.
#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct LionSettings {
    /// Share of the momentum in the direction of a step; the rest is the gradient's.
    blend: f32,
    /// Share of the momentum that each step keeps.
    momentum: f32,
}

impl Default for LionSettings {
    fn default() -> Self {
        LionSettings { blend: 0.9, momentum: 0.99 }
    }
}

impl Lion {
    fn new(init: OptimizerInit) -> Result<Self, ConfigError> {
        Ok(Lion { settings: init.extra()?, weight_decay: init.section.weight_decay })
    }
}

impl Rule for Lion {
    fn name(&self) -> &str {
        "lion"
    }

    fn slots(&self) -> &[&'static str] {
        &["momentum"]
    }

    fn settings(&self, shape: &[usize]) -> Settings {
        let weight_decay = if shape.len() >= 2 { self.weight_decay } else { 0.0 };
        Settings { weight_decay, ..Settings::default() }
    }

    /// A shard is passed in any number of runs of elements, with arbitrary boundaries.
    fn update(&self, step: &UpdateStep, run: ShardRun<'_>) {
        let LionSettings { blend, momentum: stays } = self.settings;
        let ShardRun { weights, gradient, mut slots, settings } = run;
        let rate = (step.learning_rate * settings.learning_rate) as f32;
        let (kept, clip) = (settings.kept(step.learning_rate), step.gradient_factor as f32);
        for ((weight, gradient), momentum) in weights.iter_mut().zip(gradient).zip(slots[0].iter_mut()) {
            let gradient = gradient * clip;
            let direction = blend * *momentum + (1.0 - blend) * gradient;
            let sign = if direction == 0.0 { 0.0 } else { direction.signum() };
            *weight = *weight * kept - rate * sign;
            *momentum = stays * *momentum + (1.0 - stays) * gradient;
        }
    }
}

fn main() -> ExitCode {
    kiln::cli::main(Registry::default().optimizer("lion", Lion::new))
}
