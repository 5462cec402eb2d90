//! Host costs of a step, per step and per block, from two runs that differ in the number of blocks.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::trace::Trace;

/// The required part of the report of `kiln-bench step --json`.
#[derive(Deserialize)]
pub struct Report {
    pub model: Model,
    pub step_s: Vec<f64>,
    planned_rank_bytes: Option<u64>,
    tokens_per_s: f64,
    model_flops_per_s: f64,
    pub global_batch: u64,
    pub seq_len: u64,
}

#[derive(Clone, Copy, Deserialize)]
pub struct Model {
    pub vocab_size: u64,
    pub d_model: u64,
    pub layers: u64,
    pub heads: u64,
}

impl Report {
    pub fn read(folder: &Path) -> Result<Report, String> {
        let path = folder.join("report.json");
        let at = |problem: String| format!("{}: {problem}", path.display());
        let text = fs::read_to_string(&path).map_err(|error| at(error.to_string()))?;
        serde_json::from_str(&text).map_err(|error| at(error.to_string()))
    }

    pub fn flops_per_token(&self) -> f64 {
        self.model_flops_per_s / self.tokens_per_s
    }

    /// Returns the shortest step: other load on the machine makes steps longer, never shorter.
    fn shortest_step(&self) -> f64 {
        self.step_s.iter().copied().reduce(f64::min).unwrap_or(0.0)
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Cost {
    /// Number of kernels and matrix products.
    launches: f64,
    /// Bytes requested from the driver.
    allocated: f64,
    /// Bytes copied between host and device, and within the device.
    copied: f64,
    /// Bytes passed to collectives.
    sent: f64,
    /// Microseconds from the first token to the end of the update.
    micros: f64,
}

impl Cost {
    fn of(trace: &Trace, seconds: f64) -> Result<Cost, String> {
        let mut cost = Cost { micros: seconds * 1e6, ..Cost::default() };
        for call in trace.last_step()? {
            let bytes = call.number("bytes") as f64;
            match call.name() {
                _ if call.launches() => cost.launches += 1.0,
                name if name.starts_with("alloc") => cost.allocated += bytes,
                name if name.starts_with("memcpy") => cost.copied += bytes,
                name if name.starts_with("nccl_") => cost.sent += bytes,
                _ => {}
            }
        }
        Ok(cost)
    }

    fn with(self, other: Cost, combine: impl Fn(f64, f64) -> f64) -> Cost {
        Cost {
            launches: combine(self.launches, other.launches),
            allocated: combine(self.allocated, other.allocated),
            copied: combine(self.copied, other.copied),
            sent: combine(self.sent, other.sent),
            micros: combine(self.micros, other.micros),
        }
    }

    /// Formats a table row, with the time for whole steps only: busy machines distort differences between runs.
    fn row(&self, what: &str, is_measured: bool) -> String {
        let Cost { launches, allocated, copied, sent, micros } = *self;
        let micros = if is_measured { format!("{:.0}", micros / launches) } else { String::new() };
        format!("| {what} | {launches:.0} | {micros} | {allocated:.0} | {copied:.0} | {sent:.0} |\n")
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Reserved {
    device: u64,
    pinned: u64,
}

impl Reserved {
    fn of(trace: &Trace) -> Reserved {
        let (mut reserved, mut now) = (Reserved::default(), 0_u64);
        let mut sizes = BTreeMap::new();
        for call in trace.calls() {
            match call.name() {
                "alloc" | "alloc_async" if call.field("result") == "0" => {
                    sizes.insert(call.field("at"), call.number("bytes"));
                    now += call.number("bytes");
                    reserved.device = reserved.device.max(now);
                }
                "free" | "free_async" => now -= sizes.remove(call.field("at")).unwrap_or(0),
                "alloc_host" | "host_register" => reserved.pinned += call.number("bytes"),
                _ => {}
            }
        }
        reserved
    }

    fn row(&self, what: &str, planned: Option<u64>) -> String {
        let mebibytes = |bytes: u64| format!("{:.0}", bytes as f64 / f64::from(1 << 20));
        let beyond = planned.map_or(String::new(), |planned| {
            format!("{:.0} %", 100.0 * (self.device as f64 / planned as f64 - 1.0))
        });
        let planned = planned.map_or(String::new(), mebibytes);
        format!(
            "| {what} | {} | {planned} | {beyond} | {} |\n",
            mebibytes(self.device),
            mebibytes(self.pinned)
        )
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Most {
    block: u32,
    /// Launches per step, without those of its blocks.
    rest: u32,
    reserved_mib: u32,
    pinned_mib: u32,
}

/// Prints the cost and the memory of steps in `folders`, two per preset; returns whether they meet `limits`.
pub fn run(folders: &[PathBuf], limits: Option<&Path>) -> Result<bool, String> {
    let limits: Option<BTreeMap<String, Most>> = match limits {
        None => None,
        Some(path) => {
            let text = fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
            Some(toml::from_str(&text).map_err(|error| format!("{}: {error}", path.display()))?)
        }
    };
    let mut costs = String::from(
        "| | launches | µs of the host per launch | bytes allocated | bytes copied | bytes sent |\n\
         |---|---|---|---|---|---|\n",
    );
    let mut memory = String::from(
        "| | MiB reserved on the device | MiB in the plan | reserved beyond it | MiB pinned |\n|---|---|---|---|---|\n",
    );
    let mut said = Vec::new();
    for pair in folders.chunks(2) {
        let [fewer, more] = pair else { return Err("two folders are needed for each preset".to_owned()) };
        let preset = fewer.parent().and_then(Path::file_name).unwrap_or_default().to_string_lossy();
        let reports = [Report::read(fewer)?, Report::read(more)?];
        let traces = [Trace::read(fewer)?, Trace::read(more)?];
        let [low, high] = [0, 1].map(|at| reports[at].model.layers as f64);
        if low >= high {
            return Err(format!("{preset}: the second folder must have more blocks than the first"));
        }
        let fewer = Cost::of(&traces[0], reports[0].shortest_step())?;
        let more = Cost::of(&traces[1], reports[1].shortest_step())?;
        let block = more.with(fewer, |more, fewer| (more - fewer) / (high - low));
        let rest = fewer.with(block, |all, block| all - low * block);
        costs.push_str(&block.row(&format!("{preset}, a block"), false));
        costs.push_str(&rest.row(&format!("{preset}, the rest of a step"), false));
        costs.push_str(&more.row(&format!("{preset}, a step of {high} blocks"), true));
        let reserved = [0, 1].map(|at| Reserved::of(&traces[at]));
        for (at, reserved) in reserved.iter().enumerate() {
            let what = format!("{preset}, {} blocks", reports[at].model.layers);
            memory.push_str(&reserved.row(&what, reports[at].planned_rank_bytes));
        }
        let Some(limits) = &limits else { continue };
        let Some(most) = limits.get(&*preset) else { return Err(format!("{preset} has no limits")) };
        let mebibytes = |bytes: u64| bytes.div_ceil(1 << 20) as f64;
        for (what, used, limit) in [
            ("launches of a block", block.launches, most.block),
            ("launches of the rest of a step", rest.launches, most.rest),
            ("MiB reserved on the device", mebibytes(reserved[1].device), most.reserved_mib),
            ("MiB pinned", mebibytes(reserved[1].pinned), most.pinned_mib),
        ] {
            if used > f64::from(limit) {
                said.push(format!("{preset}: {used} {what}, and the limit is {limit}"));
            }
        }
    }
    println!("{costs}\n{memory}");
    said.iter().for_each(|line| println!("{line}"));
    Ok(said.is_empty())
}
