//! A summary of GPUs. GPUs lag behind the threads that feed them, so it covers all steps together.

use std::collections::BTreeMap;

use serde::Serialize;

use super::step::{covered, seconds};
use crate::trace::model::{GpuTrace, RankTrace};

/// The summary of one GPU.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GpuSummary {
    /// The rank that uses the GPU.
    pub rank: usize,
    /// Seconds from the start of the first activity to the end of the last one.
    pub seconds: f64,
    /// Seconds in which the GPU was busy.
    pub busy_s: f64,
    /// Seconds in which only NCCL kernels ran.
    pub exposed_s: f64,
}

/// All calls of one kernel, or copies of one kind, on all ranks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KernelSummary {
    /// Name of the kernel, or kind of copy.
    pub name: String,
    /// Number of calls.
    pub calls: u64,
    /// Total duration in seconds.
    pub seconds: f64,
}

pub(super) fn summarise(rank: &RankTrace) -> Option<GpuSummary> {
    let start = rank.gpu.iter().map(|activity| activity.start).min()?;
    let end = rank.gpu.iter().map(|activity| activity.end).max()?;
    let times = |activity: &GpuTrace| (activity.start, activity.end);
    let busy = covered(rank.gpu.iter().map(times));
    let is_computing = |activity: &&GpuTrace| !activity.name.starts_with("nccl");
    let computing = covered(rank.gpu.iter().filter(is_computing).map(times));
    Some(GpuSummary {
        rank: rank.rank,
        seconds: seconds(end - start),
        busy_s: seconds(busy),
        exposed_s: seconds(busy - computing),
    })
}

pub(super) fn kernels(ranks: &[RankTrace]) -> Vec<KernelSummary> {
    let mut sums: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    for activity in ranks.iter().flat_map(|rank| &rank.gpu) {
        let (calls, time) = sums.entry(&activity.name).or_default();
        *calls += 1;
        *time += activity.end - activity.start;
    }
    let mut sums: Vec<_> = sums.into_iter().collect();
    sums.sort_by_key(|(_, (_, time))| std::cmp::Reverse(*time));
    let kernel = |(name, (calls, time)): (&str, (u64, u64))| KernelSummary {
        name: name.to_owned(),
        calls,
        seconds: seconds(time),
    };
    sums.into_iter().map(kernel).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn activity(name: &str, stream: u32, start: u64, end: u64) -> GpuTrace {
        GpuTrace { name: name.to_owned(), stream, bytes: None, start, end }
    }

    #[test]
    fn only_unhidden_communication_is_exposed() {
        let gpu = vec![
            activity("matmul", 7, 1_000, 3_000),
            activity("ncclDevKernel_AllGather_RING_LL", 9, 2_000, 6_000),
            activity("norm", 7, 5_000, 5_500),
            activity("copy device to device", 7, 8_000, 8_250),
        ];
        let trace = |gpu| RankTrace {
            rank: 3,
            node: "here".to_owned(),
            clock_error: None,
            groups: BTreeMap::new(),
            steps: Vec::new(),
            gpu,
        };
        let ranks = [trace(gpu), trace(vec![activity("matmul", 7, 0, 500)]), trace(Vec::new())];
        let expected = GpuSummary { rank: 3, seconds: 7.25e-6, busy_s: 5.25e-6, exposed_s: 2.5e-6 };
        assert_eq!(summarise(&ranks[0]), Some(expected));
        assert_eq!(summarise(&ranks[2]), None);
        let names: Vec<_> = kernels(&ranks).into_iter().map(|sum| (sum.name, sum.calls)).collect();
        let expected = [
            ("ncclDevKernel_AllGather_RING_LL", 1),
            ("matmul", 2),
            ("norm", 1),
            ("copy device to device", 1),
        ];
        assert_eq!(names, expected.map(|(name, calls)| (name.to_owned(), calls)));
    }
}
