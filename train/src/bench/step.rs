//! `kiln bench step`: the time of training steps on made-up tokens, in the terms of
//! `benches/peers/torch_fsdp.py`, so that `benches/compare` can hold the two against each other.

use std::path::PathBuf;

use clap::Args;
use kiln_model::ModelConfig;
use kiln_shard::{Recompute, Strategy};
use serde::Serialize;

use super::measure::{Measured, Steps, measure};
use super::{BenchError, check_counts, default_config, median, process};
use crate::config::{self, Config, Precision};
use crate::device::{Peak, Selected, threads_per_rank};
use crate::train::{TrainError, check_memory};
use crate::words::number_of;

/// What to measure.
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
    /// Steps that are timed.
    #[arg(long, default_value_t = 10)]
    steps: usize,
    /// Steps before them.
    #[arg(long, default_value_t = 2)]
    warmup: usize,
    /// Print one line of JSON instead of text.
    #[arg(long)]
    json: bool,
}

/// What came out; the names are those of the peer, as far as it has the same.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepReport {
    /// `"kiln"`.
    pub system: &'static str,
    /// Kiln's version.
    pub version: &'static str,
    /// The device, in words.
    pub device: String,
    /// What was trained.
    pub model: ModelConfig,
    /// Its number of parameters.
    pub parameters: usize,
    /// How state was spread over ranks.
    pub strategy: Strategy,
    /// What ran again in backward.
    pub recompute: Recompute,
    /// Dtype of computation.
    pub dtype: Precision,
    /// Ranks, as threads.
    pub ranks: usize,
    /// Compute threads of each rank.
    pub threads_per_rank: usize,
    /// Sequences per step.
    pub global_batch: usize,
    /// Sequences per pass of a rank.
    pub micro_batch: usize,
    /// Tokens per sequence.
    pub seq_len: usize,
    /// Tokens of a step over the median of `step_s`.
    pub tokens_per_s: f64,
    /// Seconds of every timed step, of the slowest rank.
    pub step_s: Vec<f64>,
    /// Median of the seconds that updates took.
    pub update_s: f64,
    /// Seconds from the start of the process to the end of its first step.
    pub first_step_s: Option<f64>,
    /// FLOP/s of the model, by [`ModelConfig::flops_per_token`].
    pub model_flops_per_s: f64,
    /// What the device could do in matrix products, by `device.peak_tflops`, its data sheet, or a
    /// product of matrices that is measured after the steps; nothing where none of these is known.
    pub peak_flops_per_s: Option<f64>,
    /// `model_flops_per_s` over `peak_flops_per_s`.
    pub mfu: Option<f64>,
    /// The most memory that the process has had, all ranks together.
    pub peak_rss_sum_bytes: Option<u64>,
    /// The most bytes of the host's memory that each rank has held, as its allocations were counted.
    pub peak_rank_bytes: Vec<u64>,
    /// The most bytes of the device's memory that were reserved for the steps, if it has its own.
    pub peak_reserved_bytes: Option<u64>,
}

impl StepArgs {
    /// Measures; returns what to say.
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
        let selected = Selected::new(&config, None)?;
        config.settle(selected.suits());
        check_memory(&config, &model, &selected, None)?;
        let measured = measure(&config, &model, &selected.device(), steps)?;
        let ranks = config.train.ranks;
        let peak = match config.device.peak_tflops {
            Some(peak) => Peak::given(peak * 1e12),
            None => selected.peak(
                config.precision.compute(),
                None,
                ranks,
                threads_per_rank(&config.device, ranks),
            )?,
        };
        let report = StepReport::new(&config, model, selected.describe(), Some(peak), measured);
        Ok(if self.json { report.to_json() } else { report.to_text() })
    }
}

/// Checks a configuration whose data are made up; the shape of its model.
pub(super) fn checked(config: &mut Config) -> Result<ModelConfig, TrainError> {
    if config.data.path.as_os_str().is_empty() {
        // No data is read.
        config.data.path = "unused".into();
    }
    config.validate_threads()?;
    config.model.resolve(Some(config.data.vocab_size)).map_err(TrainError::usage)
}

/// Numbers of steps that make sense.
pub(super) fn counted(timed: usize, warmup: usize) -> Result<Steps, BenchError> {
    check_counts(&[("--steps", timed), ("--warmup", warmup)])?;
    Ok(Steps { timed, warmup })
}

impl StepReport {
    /// What `measured` means for the steps of `config` on a device with that `peak`.
    pub(super) fn new(
        config: &Config,
        model: ModelConfig,
        device: String,
        mut peak: Option<Peak>,
        measured: Measured,
    ) -> Self {
        let tokens = (config.train.global_batch * config.data.seq_len) as f64;
        let tokens_per_s = tokens / median(measured.steps.clone());
        let flops = model.flops_per_token(model.active_parameters(), config.data.seq_len);
        let model_flops_per_s = flops * tokens_per_s;
        let ranks = config.train.ranks;
        // First: it may correct the peak.
        let mfu = peak.as_mut().map(|peak| peak.share(model_flops_per_s));
        StepReport {
            system: "kiln",
            version: env!("CARGO_PKG_VERSION"),
            device,
            parameters: measured.parameters,
            strategy: config.shard.strategy,
            recompute: config.shard.recompute,
            dtype: config.precision.compute(),
            ranks,
            threads_per_rank: threads_per_rank(&config.device, ranks),
            global_batch: config.train.global_batch,
            micro_batch: config.micro_batch(),
            seq_len: config.data.seq_len,
            tokens_per_s,
            step_s: measured.steps,
            update_s: median(measured.updates),
            first_step_s: measured.first_step,
            model_flops_per_s,
            peak_flops_per_s: peak.map(|peak| peak.flops()),
            mfu,
            peak_rss_sum_bytes: process::peak_rss(),
            peak_rank_bytes: measured.rank_bytes,
            peak_reserved_bytes: measured.device_bytes,
            model,
        }
    }

    /// One line of JSON.
    pub fn to_json(&self) -> String {
        // Numbers and strings only: this cannot fail.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// The report for people.
    pub fn to_text(&self) -> String {
        let known = |value: Option<f64>, unit: &str| match value {
            Some(value) => format!("{value:.2} {unit}"),
            None => "not known".to_owned(),
        };
        let megabytes = |bytes: Option<u64>| known(bytes.map(|bytes| bytes as f64 / 1e6), "MB");
        let ranks = self.peak_rank_bytes.iter().copied().max();
        let mut lines = vec![
            self.device.clone(),
            format!(
                "{:.2}M parameters, {} on {}, {} x {} per step",
                self.parameters as f64 / 1e6,
                self.strategy,
                number_of(self.ranks, "rank"),
                number_of(self.global_batch, "sequence"),
                number_of(self.seq_len, "token")
            ),
            format!(
                "{:.0} tok/s; a step takes {:.4} s, its update {:.4} s",
                self.tokens_per_s,
                median(self.step_s.clone()),
                self.update_s
            ),
            format!("MFU: {}", known(self.mfu.map(|mfu| 100.0 * mfu), "%")),
            format!("first step done after {}", known(self.first_step_s, "s")),
            format!(
                "peak memory: {} of the process, {} of a rank",
                megabytes(self.peak_rss_sum_bytes),
                megabytes(ranks)
            ),
        ];
        if self.peak_reserved_bytes.is_some() {
            lines.push(format!("on the device: {}", megabytes(self.peak_reserved_bytes)));
        }
        lines.join("\n")
    }
}
