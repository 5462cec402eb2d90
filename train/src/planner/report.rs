//! A plan as text and as JSON, and what it recommends.

use std::fmt::Write as _;

use kiln_shard::{Recompute, Strategy};
use serde::Serialize;

use super::table::PlanRow;
use super::target::{Hardware, Target};
use crate::checkpoint::size;
use crate::words::number_of;

/// A plan.
#[derive(Clone, Debug, Serialize)]
pub struct PlanReport {
    /// Number of parameters.
    pub parameters: usize,
    /// Ranks.
    pub ranks: usize,
    /// Machines.
    pub nodes: usize,
    /// What computes.
    pub device: String,
    /// Bytes of memory of a GPU, or of the machine.
    pub memory_bytes: Option<u64>,
    /// Tokens of a step.
    pub tokens_per_step: usize,
    /// Tokens of the run.
    pub tokens: u64,
    /// The ways to run it.
    pub rows: Vec<PlanRow>,
    /// The one to take; `null` if none fits.
    pub recommended: Option<Recommendation>,
}

/// The row to take, and why.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Recommendation {
    /// Its index.
    pub row: usize,
    /// Its strategy.
    pub strategy: Strategy,
    /// Its recomputation.
    pub recompute: Recompute,
    /// Whether it offloads.
    pub offload: bool,
    /// Its micro-batch.
    pub micro_batch: usize,
    /// Why.
    pub reason: String,
}

/// Two rows whose times differ by less are as fast, for all that a plan knows.
const AS_FAST: f64 = 1.03;

/// The row to take: the fastest that fits; the first of those that are as fast, which holds or does less besides.
/// Where the speed is not known, the one that sends least and computes nothing twice.
pub fn recommend(rows: &[PlanRow], name: &str, target: &Target) -> Option<Recommendation> {
    let fitting = || rows.iter().enumerate().filter(|(_, row)| row.fits != Some(false));
    let cost = |row: &PlanRow| match row.step_s {
        Some(seconds) => seconds,
        None => {
            let again = f64::from(u8::from(row.recompute == Recompute::Block));
            let offloads = f64::from(u8::from(row.offload));
            1.0 + again + 4.0 * offloads + 1e-15 * row.sent_bytes as f64
        }
    };
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
        Some(largest) => _ = write!(reason, "; micro_batch {largest} fits"),
        None => reason.push_str("; how much there is was not said (--memory)"),
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

/// A row in words: `FULL_SHARD with recompute`.
fn way(row: &PlanRow) -> String {
    let with = [(row.recompute == Recompute::Block, "recompute"), (row.offload, "offload")];
    let with: Vec<_> = with.into_iter().filter(|(is, _)| *is).map(|(_, what)| what).collect();
    match with[..] {
        [] => row.strategy.to_string(),
        _ => format!("{} with {}", row.strategy, with.join(" and ")),
    }
}

impl Target {
    /// In words: `8 x 46.0 GiB`.
    pub fn describe(&self) -> String {
        let memory = self.memory.map(size);
        match self.hardware {
            Hardware::Gpu(sheet) => format!("{} x {} ({})", self.ranks, sheet.name, size(sheet.memory())),
            Hardware::Unknown { .. } => format!("{} x {}", self.ranks, memory.unwrap_or_default()),
            Hardware::Cpu(_) => {
                let memory = memory.map_or_else(String::new, |memory| format!(" in {memory}"));
                format!("{} on the CPU{memory}", number_of(self.ranks, "rank"))
            }
        }
    }
}

impl PlanReport {
    /// The plan as JSON.
    pub fn to_json(&self) -> String {
        // Numbers and strings only: this cannot fail.
        serde_json::to_string_pretty(self).unwrap_or_default()
    }

    /// The plan for people.
    pub fn to_text(&self) -> String {
        let mut text = format!(
            "{:.2}M parameters, {} in {}, {} tokens per step; per rank, at the moment of its peak\n\n",
            self.parameters as f64 / 1e6,
            number_of(self.ranks, "rank"),
            number_of(self.nodes, "machine"),
            self.tokens_per_step,
        );
        let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
        let _ = writeln!(
            text,
            "  {:<21} {:<9} {:<7} {:>6} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>6} {:>7} {:>9} {:>8} {:>6}",
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
            "fits",
            "largest",
            "sent",
            "s/step",
            "MFU"
        );
        for (index, row) in self.rows.iter().enumerate() {
            let is_recommended = self.recommended.as_ref().is_some_and(|found| found.row == index);
            let of = |name: &str| row.phases.get(name).copied().unwrap_or(0);
            let fits = row.fits.map_or("?", |fits| if fits { "yes" } else { "no" });
            let dash = || "-".to_owned();
            let _ = writeln!(
                text,
                "{} {:<21} {:<9} {:<7} {:>6} {:>8.2} {:>8.2} {:>8.2} {:>8.2} {:>8.2} {:>8.2} {:>6} {:>7} {:>9.3} \
                 {:>8} {:>6}",
                if is_recommended { "*" } else { " " },
                row.strategy.to_string(),
                row.recompute.to_string(),
                if row.offload { "host" } else { "-" },
                row.micro_batch,
                gib(of("weights")),
                gib(of("gradients")),
                gib(of("optimizer")),
                gib(of("gathered")),
                gib(of("activations") + of("logits")),
                gib(row.peak_bytes),
                fits,
                row.largest_micro_batch.map_or_else(dash, |size| size.to_string()),
                gib(row.sent_bytes),
                row.step_s.map_or_else(dash, seconds_of),
                row.mfu.map_or_else(dash, |mfu| format!("{:.1}%", 100.0 * mfu)),
            );
        }
        text.push_str(
            "\nGiB; sent: per step; largest: the largest micro-batch that fits. The peak has logits, buffers of \
             communication and,\non GPUs, about 1.5 GiB of the runtime besides.\n",
        );
        match &self.recommended {
            None => {
                text.push_str("\nNothing fits: more ranks, a smaller data.seq_len, or a smaller model would.")
            }
            Some(found) => {
                let row = &self.rows[found.row];
                let _ = write!(text, "\n* {}\n  --set shard.strategy={}", found.reason, row.strategy);
                let _ = write!(text, " --set shard.recompute={}", row.recompute);
                if row.offload {
                    text.push_str(" --set shard.offload=true");
                }
                let _ = write!(text, " --set train.micro_batch={}", row.micro_batch);
                if let Some(seconds) = row.run_s {
                    let _ = write!(text, "\n  the run: {} tokens in {}", self.tokens, time_of(seconds));
                }
            }
        }
        text
    }
}

/// Seconds with three digits that count.
fn seconds_of(seconds: f64) -> String {
    match seconds {
        seconds if seconds >= 100.0 => format!("{seconds:.0}"),
        seconds if seconds >= 10.0 => format!("{seconds:.1}"),
        seconds if seconds >= 1.0 => format!("{seconds:.2}"),
        seconds => format!("{seconds:.3}"),
    }
}

/// A time in the unit that people would use.
fn time_of(seconds: f64) -> String {
    match seconds {
        seconds if seconds >= 2.0 * 86_400.0 => format!("{:.1} days", seconds / 86_400.0),
        seconds if seconds >= 7_200.0 => format!("{:.1} hours", seconds / 3_600.0),
        seconds if seconds >= 120.0 => format!("{:.1} minutes", seconds / 60.0),
        seconds => format!("{seconds:.0} seconds"),
    }
}
