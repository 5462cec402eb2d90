//! Cores and memory, as far as this process may use them.

use std::fs;
use std::num::NonZero;

use kiln_model::ops;

/// Lines on this machine when `ranks` ranks share it.
pub(super) fn examine(ranks: usize) -> Vec<String> {
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let all = info.lines().filter(|line| line.starts_with("processor")).count();
    let mut lines = Vec::new();
    if cores < all {
        // Bound by mpirun or srun, which bind each rank, or by a container, which binds them all.
        lines.push(format!(
            "{cores} of {all} cores for this process, its own or shared by {ranks} ranks"
        ));
    } else {
        let threads = (cores / ranks.max(1)).max(1);
        lines.push(format!("{cores} cores for this process; {threads} for each of {ranks} ranks"));
        if ranks > cores {
            lines.push(format!("more ranks than cores: {ranks} take turns on {cores} cores"));
        }
    }
    lines.push(match ops::bf16_instructions() {
        Some(name) => format!("products of bf16 by {name}"),
        None => "no instructions for products of bf16 that Kiln knows: they are computed in f32"
            .to_owned(),
    });
    lines.push(memory());
    lines
}

fn memory() -> String {
    let info = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = |name: &str| {
        let line = info.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    let (Some(total), Some(available)) = (kib("MemTotal:"), kib("MemAvailable:")) else {
        return "memory: unknown".to_owned();
    };
    let text = format!("memory: {} of {} GiB available", gib(available << 10), gib(total << 10));
    // A container's limit, if it is lower.
    let limit = fs::read_to_string("/sys/fs/cgroup/memory.max").ok();
    match limit.and_then(|limit| limit.trim().parse::<u64>().ok()) {
        Some(limit) if limit < total << 10 => format!("{text}; limited to {} GiB", gib(limit)),
        _ => text,
    }
}

fn gib(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / f64::from(1 << 30))
}
