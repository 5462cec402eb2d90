//! `kiln-bench step`: times training steps, in the format of `benches/peers/torch_fsdp.py`, for `benches/compare`.

use std::path::PathBuf;

use clap::Args;
use kiln::bench::{check_counts, default_config};
use kiln::config::{self, Config};
use kiln::device::{Peak, ResolvedDevice, threads_per_rank};
use kiln::optimizers::Optimizers;
use kiln::planner::{Gathers, OPTIMIZER, RankShape, Speed, WEIGHTS};
use kiln::run::{TrainError, check_memory, settle_recompute};
use kiln_model::{Decoder, Key, Layers, ModelConfig};

use crate::measure::{Steps, measure};
use crate::report::StepReport;

/// The arguments of `kiln-bench step`.
#[derive(Args, Clone, Debug)]
pub struct StepArgs {
    /// Configuration whose model, batch and policy to use [default: preset 10m, 4 sequences].
    #[arg(long)]
    config: Option<PathBuf>,
    /// Change one value of the configuration; may be given several times.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE", requires = "config")]
    overrides: Vec<String>,
    /// Ranks, as threads of this process [default: train.ranks of the configuration].
    #[arg(long)]
    ranks: Option<usize>,
    /// Timed steps.
    #[arg(long, default_value_t = 10)]
    steps: usize,
    /// Steps before the timed ones.
    #[arg(long, default_value_t = 2)]
    warmup: usize,
    /// Print one line of JSON instead of text.
    #[arg(long)]
    json: bool,
}

impl StepArgs {
    pub fn run(self) -> Result<String, TrainError> {
        let mut config = match &self.config {
            Some(path) => config::load(path, &self.overrides)?,
            None => default_config(),
        };
        if let Some(ranks) = self.ranks {
            config.train.ranks = ranks;
        }
        let model = checked(&mut config)?;
        let steps = counted(self.steps, self.warmup)?;
        let layers = Layers::default();
        let selected = ResolvedDevice::new(&config, &layers, None)?;
        config.settle(selected.defaults());
        let decoder = Decoder::new(&layers, &model, Key::new(0), &kiln::device::plain())?;
        let optimizer = Optimizers::default().make(&config.optim)?;
        let recompute = settle_recompute(&config, &model, &decoder, &optimizer, &selected, None);
        config.shard.recompute = recompute.into();
        check_memory(&config, &model, &decoder, &optimizer, &selected, None)?;
        let on_host = !selected.is_gpu();
        let gathers = if on_host { Gathers::Shared } else { Gathers::Pooled };
        let planned = RankShape::from_config(&config, &model, &decoder, &optimizer, gathers, on_host)
            .ok()
            .map(|shape| shape.step(&Speed::INSTANT));
        let measured = measure(&config, &model, &selected.device(), steps)?;
        let ranks = config.train.ranks;
        let peak = match config.device.peak_tflops {
            Some(peak) => Peak::given(peak * 1e12),
            None => selected
                .peak(config.precision.compute(), None, ranks, threads_per_rank(&config.device, ranks))
                .map_err(TrainError::threads("threads that measure the peak of this machine"))?,
        };
        let mut report = StepReport::new(&config, model.clone(), selected.describe(), Some(peak), measured);
        if let Some(planned) = planned {
            report.planned_rank_bytes = Some(planned.peak.bytes);
            report.planned_state_bytes = Some(planned.peak.of(WEIGHTS) + planned.peak.of(OPTIMIZER));
            report.planned_reserved_bytes = Some(planned.peak.bytes + planned.kept()).filter(|_| !on_host);
        }
        Ok(if self.json { report.to_json() } else { report.to_text() })
    }
}

/// Checks a configuration for steps on made-up tokens, and returns its model.
pub fn checked(config: &mut Config) -> Result<ModelConfig, TrainError> {
    if config.data.path.as_os_str().is_empty() {
        // No data is read.
        config.data.path = "unused".into();
    }
    config.validate_threads()?;
    config.resolve_model(None, Some(config.data.vocab_size)).map_err(TrainError::usage)
}

pub fn counted(timed: usize, warmup: usize) -> Result<Steps, TrainError> {
    check_counts(&[("--steps", timed), ("--warmup", warmup)])?;
    Ok(Steps { timed, warmup })
}
