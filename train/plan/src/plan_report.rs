//! A plan as text and as JSON, and its recommendations.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use kiln_config::{Choice, Config};
use kiln_shard::{Accumulate, Recompute, Strategy};
use kiln_sys::words::{number_of, size};
use serde::Serialize;

use super::Gathers;
use super::table::{PlanRow, Planned};
use super::target::{Hardware, Target};

/// A plan.
#[derive(Clone, Debug, Serialize)]
pub struct PlanReport {
    /// Number of parameters.
    pub parameters: usize,
    /// Number of token ids that the model knows.
    pub vocab_size: usize,
    /// Number of ranks.
    pub ranks: usize,
    /// Number of machines.
    pub nodes: usize,
    /// The computing device.
    pub device: String,
    /// Memory of a GPU, or of the machine, in bytes.
    pub memory_bytes: Option<u64>,
    /// Share of the memory that a recommendation leaves free, from 0 to 1.
    pub margin: f64,
    /// Tokens per step.
    pub tokens_per_step: usize,
    /// Tokens of the run.
    pub tokens: u64,
    /// Changes to the batch that let the ranks share it evenly, as settings.
    pub changed: Vec<String>,
    /// `shard.shard_size` of the configuration, which only the hybrid strategies accept.
    #[serde(skip)]
    pub shard_size: Option<usize>,
    /// Layers that do not describe their memory, which is estimated from their parameters.
    pub undescribed: BTreeSet<&'static str>,
    /// The ways to run the configuration.
    pub rows: Vec<PlanRow>,
    /// Advice to switch to the other value of `shard.accumulate`; `null` if that is not better.
    pub accumulate: Option<String>,
    /// The recommended row; `null` if none fits.
    pub recommended: Option<Recommendation>,
}

/// The recommended row and the reason.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Recommendation {
    /// Index of the row.
    pub row: usize,
    /// Strategy of the row.
    pub strategy: Strategy,
    /// Recomputation of the row.
    pub recompute: Recompute,
    /// True if the row keeps state on the host.
    pub offload: bool,
    /// Micro-batch of the row.
    pub micro_batch: usize,
    /// The reason for the recommendation.
    pub reason: String,
}

/// Ratio of two rows' times below which the rows count as equally fast, given the accuracy of a plan.
const AS_FAST: f64 = 1.03;

/// Recommends the fastest row that fits and leaves the margin of `target` free; among equally fast rows, the
/// first, which holds less memory or does less work. If the speed is unknown, recommends the row that sends least
/// and recomputes nothing.
pub fn recommend(rows: &[PlanRow], name: &str, target: &Target) -> Option<Recommendation> {
    let fitting = || rows.iter().enumerate().filter(|(_, row)| row.leaves_margin != Some(false));
    let least = fitting().map(|(_, row)| cost(row)).min_by(f64::total_cmp)?;
    let (index, row) = fitting().find(|(_, row)| cost(row) <= AS_FAST * least)?;
    let strategy = row.strategy;
    let way = way(row);
    let takes = size(row.needed_bytes);
    let mut reason = format!("{name} on {}: ", target.describe());
    let larger = rows.iter().filter(|row| row.fits == Some(false)).max_by_key(|row| row.needed_bytes);
    if let Some(larger) = larger {
        let _ = write!(reason, "{} needs {}; ", self::way(larger), size(larger.needed_bytes));
    }
    let _ = write!(reason, "{way} needs {takes}");
    match row.largest_micro_batch {
        Some(largest) if largest > row.micro_batch => {
            _ = write!(reason, "; micro_batch {} fits, and up to {largest}", row.micro_batch);
        }
        Some(largest) => _ = write!(reason, "; micro_batch {largest} fits"),
        None => reason.push_str("; the memory is unknown (device.memory sets it)"),
    }
    if let Some(seconds) = row.step_s {
        let _ = write!(reason, "; {} s per step", seconds_of(seconds));
    }
    Some(Recommendation {
        row: index,
        strategy,
        recompute: row.recompute,
        offload: row.offload,
        micro_batch: row.micro_batch,
        reason,
    })
}

/// Returns the cost by which fitting rows are compared: the seconds of a step or, if the speed is unknown, a score
/// of recomputation, offload and bytes sent.
fn cost(row: &PlanRow) -> f64 {
    match row.step_s {
        Some(seconds) => seconds,
        None => {
            let again = match row.recompute {
                Recompute::None => 0.0,
                Recompute::Selective => 0.1,
                Recompute::Block => 1.0,
                Recompute::Every(blocks) => 1.0 / blocks.get() as f64,
            };
            let offloads = f64::from(u8::from(row.offload));
            1.0 + again + 4.0 * offloads + 1e-15 * row.sent_bytes as f64
        }
    }
}

/// Advises the value of `shard.accumulate` that `rows` do not use, if a row with it fits and is faster than the
/// `recommended` row. A plan never changes this key itself, because the two values round differently.
pub fn advise(
    planned: &Planned<'_>,
    rows: &[PlanRow],
    recommended: Option<&Recommendation>,
) -> Option<String> {
    let accumulates = |row: &&PlanRow| planned.target.ranks > 1 && row.micro_batches > 1;
    let others = rows.iter().filter(accumulates).filter_map(|row| planned.row(other(planned, row)));
    let fitting = others.filter(|row| row.fits != Some(false));
    let best = fitting.min_by(|a, b| cost(a).total_cmp(&cost(b)))?;
    let own = recommended.map_or(f64::INFINITY, |found| cost(&rows[found.row]));
    (AS_FAST * cost(&best) < own).then(|| {
        format!(
            "With --set shard.accumulate={}, {} needs {} and sends {} per step; the last bits of gradients differ.",
            best.accumulate,
            way(&best),
            size(best.needed_bytes),
            size(best.sent_bytes)
        )
    })
}

/// Returns the configuration of `row` with the other value of `shard.accumulate`.
fn other(planned: &Planned<'_>, row: &PlanRow) -> Config {
    let mut config = planned.config.clone();
    (config.shard.strategy, config.shard.recompute) = (row.strategy, row.recompute.into());
    config.shard.shard_size = planned.shard_size().filter(|_| row.strategy.is_hybrid());
    config.shard.offload = row.offload;
    config.shard.accumulate = Some(match row.accumulate {
        Accumulate::Sharded => Accumulate::Unsharded,
        Accumulate::Unsharded => Accumulate::Sharded,
    });
    config.train.micro_batch = Choice::Is(row.micro_batch);
    config
}

/// Describes how a row runs, as in `FULL_SHARD with recompute`.
fn way(row: &PlanRow) -> String {
    let recompute = match row.recompute {
        Recompute::None => None,
        Recompute::Selective => Some("selective recompute".to_owned()),
        Recompute::Block => Some("recompute".to_owned()),
        Recompute::Every(blocks) => Some(format!("recompute of every block in {blocks}")),
    };
    let offload = row.offload.then(|| "offload".to_owned());
    let with: Vec<_> = recompute.into_iter().chain(offload).collect();
    match &with[..] {
        [] => row.strategy.to_string(),
        _ => format!("{} with {}", row.strategy, with.join(" and ")),
    }
}

impl Target {
    /// Describes the target, as in `8 x 46.0 GiB`.
    pub fn describe(&self) -> String {
        let memory = self.memory.map(size);
        match self.hardware {
            Hardware::Gpu(sheet) => format!("{} x {} ({})", self.ranks, sheet.name, size(sheet.memory())),
            Hardware::Unknown { .. } => format!("{} x {}", self.ranks, memory.unwrap_or_default()),
            Hardware::Cpu(_) => {
                let memory = memory.map_or_else(String::new, |memory| format!(" in {memory}"));
                let processes = self.gathers() == Gathers::Pooled && self.ranks > 1;
                let processes = if processes { ", as processes" } else { "" };
                format!("{} on the CPU{memory}{processes}", number_of(self.ranks, "rank"))
            }
        }
    }
}

impl PlanReport {
    /// Returns the plan as JSON.
    pub fn to_json(&self) -> String {
        // Serializing numbers and strings cannot fail.
        serde_json::to_string_pretty(self).unwrap_or_default()
    }

    /// Returns the plan as text.
    pub fn to_text(&self) -> String {
        let mut text = format!(
            "{:.2}M parameters, vocabulary {}, {} in {}, {} tokens per step\n",
            self.parameters as f64 / 1e6,
            self.vocab_size,
            number_of(self.ranks, "rank"),
            number_of(self.nodes, "machine"),
            self.tokens_per_step,
        );
        if !self.changed.is_empty() {
            let _ =
                writeln!(text, "changed, so that the ranks can share the batch: {}", self.changed.join(", "));
        }
        // Choose a unit in which the largest value has some digits.
        let most = self.rows.iter().map(|row| row.peak_bytes).max().unwrap_or(0);
        let (unit, name) = if most >= 1 << 30 { (1u64 << 30, "GiB") } else { (1 << 20, "MiB") };
        let of_unit = |bytes: u64| bytes as f64 / unit as f64;
        let _ = writeln!(
            text,
            "\n  {:<21} {:<9} {:>8} {:>6} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>5} {:>7} {:>9} {:>7} {:>6}",
            "strategy",
            "recompute",
            "offload",
            "micro",
            "weights",
            "grads",
            "optim",
            "gathered",
            "activ.",
            "peak",
            "needs",
            "fits",
            "largest",
            "sent",
            "s/step",
            "MFU"
        );
        let per_node = self.ranks.div_ceil(self.nodes.max(1)) as u64;
        for (index, row) in self.rows.iter().enumerate() {
            let is_recommended = self.recommended.as_ref().is_some_and(|found| found.row == index);
            let of = |name: &str| row.phases.get(name).copied().unwrap_or(0);
            let fits = row.fits.map_or("?", |fits| if fits { "yes" } else { "no" });
            let dash = || "-".to_owned();
            let offload = match row.offload {
                true => format!("{:.1}", of_unit(row.host_bytes.saturating_mul(per_node))),
                false => dash(),
            };
            let _ = writeln!(
                text,
                "{} {:<21} {:<9} {:>8} {:>6} {:>8.2} {:>8.2} {:>8.2} {:>8.2} {:>8.2} {:>8.2} {:>8.2} {:>5} {:>7} \
                 {:>9.3} {:>7} {:>6}",
                if is_recommended { "*" } else { " " },
                row.strategy.to_string(),
                row.recompute.to_string(),
                offload,
                row.micro_batch,
                of_unit(of("weights")),
                of_unit(of("gradients")),
                of_unit(of("optimizer")),
                of_unit(of("gathered")),
                of_unit(of("activations") + of("logits")),
                of_unit(row.peak_bytes),
                of_unit(row.needed_bytes),
                fits,
                row.largest_micro_batch.map_or_else(dash, |size| size.to_string()),
                of_unit(row.sent_bytes),
                row.step_s.map_or_else(dash, seconds_of),
                row.mfu.map_or_else(dash, |mfu| format!("{:.1}%", 100.0 * mfu)),
            );
        }
        let _ = write!(
            text,
            "\n{name}, of one rank at its peak. peak: includes communication buffers and, on GPUs, partly \
             filled pages, the driver and NCCL.\nneeds: what must fit; for all ranks if they share a \
             machine's memory. offload: host memory for all ranks of a\nmachine, not checked against the \
             machine's memory. largest: the largest micro-batch that fits and leaves {} of the \
             memory free\n(--margin). sent: by one rank per step.\n",
            percent_of(self.margin)
        );
        if !self.undescribed.is_empty() {
            let _ = write!(text, "\n{}\n", not_described(&self.undescribed));
        }
        match &self.recommended {
            None => text.push_str(&self.why_none()),
            Some(found) => {
                let row = &self.rows[found.row];
                let group = match (self.shard_size, row.strategy) {
                    (None, _) => None,
                    (size, strategy) if strategy.is_hybrid() => size,
                    (_, Strategy::NoShard) => Some(1),
                    (..) => Some(self.ranks),
                };
                let _ = write!(text, "\n* {}\n  --set shard.strategy={}", found.reason, row.strategy);
                let _ = write!(text, " --set shard.recompute={}", row.recompute);
                if let Some(size) = group {
                    let _ = write!(text, " --set shard.shard_size={size}");
                }
                if row.offload {
                    text.push_str(" --set shard.offload=true");
                }
                for setting in self.changed.iter().filter(|setting| !setting.contains("micro_batch")) {
                    let _ = write!(text, " --set {setting}");
                }
                let _ = write!(text, " --set train.micro_batch={}", row.micro_batch);
                if let Some(seconds) = row.run_s {
                    let _ =
                        write!(text, "\n  the run: {} tokens in {}", count_of(self.tokens), time_of(seconds));
                }
            }
        }
        if let Some(advice) = &self.accumulate {
            let _ = write!(text, "\n  {advice}");
        }
        text
    }
}

impl PlanReport {
    /// Returns the reason why no row is recommended.
    fn why_none(&self) -> String {
        let fitting = self.rows.iter().filter(|row| row.fits == Some(true));
        match (fitting.min_by_key(|row| row.needed_bytes), self.memory_bytes) {
            (Some(row), Some(memory)) => format!(
                "\nNo strategy leaves {} of {} free. {} with micro_batch {} needs {}: --margin sets the share.",
                percent_of(self.margin),
                size(memory),
                way(row),
                row.micro_batch,
                size(row.needed_bytes)
            ),
            _ => "\nNo strategy fits with any micro-batch: use more ranks, a smaller data.seq_len, or a smaller model."
                .to_owned(),
        }
    }
}

/// Returns the note on a plan of a model with `layers` that do not describe their memory.
pub fn not_described(layers: &BTreeSet<&'static str>) -> String {
    let names: Vec<_> = layers.iter().copied().collect();
    format!(
        "not described: {}. The plan treats each of their matrices as a product whose input and output \
         are kept, and may be far too low; Layer::meta_forward describes a layer",
        names.join(", ")
    )
}

/// Formats a share as a percentage, without trailing zeros.
fn percent_of(share: f64) -> String {
    // Rounded to remove the noise of binary fractions.
    format!("{} %", (share * 1e4).round() / 1e2)
}

/// Formats seconds with three significant digits.
fn seconds_of(seconds: f64) -> String {
    match seconds {
        seconds if seconds >= 100.0 => format!("{seconds:.0}"),
        seconds if seconds >= 10.0 => format!("{seconds:.1}"),
        seconds if seconds >= 1.0 => format!("{seconds:.2}"),
        seconds => format!("{seconds:.3}"),
    }
}

/// Formats a time in a convenient unit.
fn time_of(seconds: f64) -> String {
    match seconds {
        seconds if seconds >= 2.0 * 86_400.0 => format!("{:.1} days", seconds / 86_400.0),
        seconds if seconds >= 7_200.0 => format!("{:.1} hours", seconds / 3_600.0),
        seconds if seconds >= 120.0 => format!("{:.1} minutes", seconds / 60.0),
        seconds => format!("{seconds:.0} seconds"),
    }
}

/// Formats a count in a readable unit.
fn count_of(count: u64) -> String {
    let units = [(1e12, "trillion"), (1e9, "billion"), (1e6, "million")];
    match units.into_iter().find(|(unit, _)| count as f64 >= *unit) {
        Some((unit, name)) => format!("{:.2} {name}", count as f64 / unit),
        None => count.to_string(),
    }
}
