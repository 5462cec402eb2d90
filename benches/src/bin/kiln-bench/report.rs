//! The report on the steps of a configuration, as text and as JSON.

use kiln::bench::median;
use kiln::config::{Config, Precision};
use kiln::device::{Peak, threads_per_rank};
use kiln::words::number_of;
use kiln_model::ModelConfig;
use kiln_shard::{Recompute, Strategy};
use serde::Serialize;

use crate::measure::Measured;
use crate::process;

/// Report on steps. Keys match those of the peer (`benches/peers/torch_fsdp.py`) for values that both report.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepReport {
    pub system: &'static str,
    pub version: &'static str,
    pub device: String,
    pub model: ModelConfig,
    pub parameters: usize,
    pub strategy: Strategy,
    pub recompute: Recompute,
    pub dtype: Precision,
    pub ranks: usize,
    pub threads_per_rank: usize,
    pub global_batch: usize,
    pub micro_batch: usize,
    pub seq_len: usize,
    /// Tokens per second, from the median of `step_s`.
    pub tokens_per_s: f64,
    pub step_s: Vec<f64>,
    pub update_s: f64,
    /// Median seconds until the host has queued a step; on the CPU, this is the whole step.
    pub queued_s: f64,
    pub first_step_s: Option<f64>,
    /// FLOP/s of the model, by [`kiln_model::Decoder::flops_per_token`].
    pub model_flops_per_s: f64,
    /// FLOP/s in matrix products: `device.peak_tflops`, the data sheet's, or measured. `None` if unknown.
    pub peak_flops_per_s: Option<f64>,
    pub mfu: Option<f64>,
    pub peak_rss_sum_bytes: Option<u64>,
    /// Peak bytes of host memory of each rank, by the counting allocator.
    pub peak_rank_bytes: Vec<u64>,
    /// Planned memory of a rank, on the device if it has its own memory.
    pub planned_rank_bytes: Option<u64>,
    /// Planned memory of the weights and the optimizer's state, which outlive a step.
    pub planned_state_bytes: Option<u64>,
    /// Planned memory that the device's allocator reserves, including the workspace of matrix products.
    pub planned_reserved_bytes: Option<u64>,
    /// Peak bytes of device memory reserved for the steps, if the device has its own memory.
    pub peak_reserved_bytes: Option<u64>,
    /// Bytes of device memory that outlive the last step, such as weights and moments.
    pub used_device_bytes: Option<u64>,
}

impl StepReport {
    pub fn new(
        config: &Config,
        model: ModelConfig,
        device: String,
        mut peak: Option<Peak>,
        measured: Measured,
    ) -> Self {
        let tokens = (config.train.global_batch * config.data.seq_len) as f64;
        let tokens_per_s = tokens / median(measured.steps.clone());
        let model_flops_per_s = measured.flops_per_token * tokens_per_s;
        let ranks = config.train.ranks;
        // Done first, because it may correct the peak.
        let mfu = peak.as_mut().map(|peak| peak.share(model_flops_per_s));
        StepReport {
            system: "kiln",
            version: env!("CARGO_PKG_VERSION"),
            device,
            parameters: measured.parameters,
            strategy: config.shard.strategy,
            recompute: config.shard.recompute(),
            dtype: config.precision.compute(),
            ranks,
            threads_per_rank: threads_per_rank(&config.device, ranks),
            global_batch: config.train.global_batch,
            micro_batch: config.micro_batch(),
            seq_len: config.data.seq_len,
            tokens_per_s,
            step_s: measured.steps,
            update_s: median(measured.updates),
            queued_s: median(measured.queued),
            first_step_s: measured.first_step,
            model_flops_per_s,
            peak_flops_per_s: peak.map(|peak| peak.flops()),
            mfu,
            peak_rss_sum_bytes: process::peak_rss(),
            peak_rank_bytes: measured.rank_bytes,
            planned_rank_bytes: None,
            planned_state_bytes: None,
            planned_reserved_bytes: None,
            peak_reserved_bytes: measured.device_bytes,
            used_device_bytes: measured.device_used,
            model,
        }
    }

    pub fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

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
            lines.push(format!(
                "on the device: {}; {} at most in use by the plan, {} after a step",
                megabytes(self.peak_reserved_bytes),
                megabytes(self.planned_rank_bytes),
                megabytes(self.used_device_bytes)
            ));
        }
        lines.join("\n")
    }
}
