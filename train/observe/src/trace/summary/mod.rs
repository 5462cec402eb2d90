//! A summary of a trace: where the time of each of its steps went.

mod display;
mod gpu;
mod path;
mod ranks;
mod step;

use serde::Serialize;

use super::model::{Calls, Trace};
pub use gpu::{GpuSummary, KernelSummary};
pub use path::PathPart;
pub use ranks::{OperationSummary, RankSummary, Slowest, UnitWait, WorkDifference};
use step::{RankStep, seconds};

/// A breakdown of the time of a trace's steps.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Machines, ordered by rank.
    pub machines: Vec<String>,
    /// Largest error bound of the machines' clocks relative to rank 0's, in seconds; `None` if any is unknown.
    pub clock_error_s: Option<f64>,
    /// Steps that every rank recorded, in order.
    pub steps: Vec<StepSummary>,
    /// GPUs with recorded activities.
    pub gpus: Vec<GpuSummary>,
    /// Activities of the GPUs, longest total time first.
    pub kernels: Vec<KernelSummary>,
}

/// A breakdown of the time of one step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepSummary {
    /// The optimizer step.
    pub step: u64,
    /// Seconds from the start on the first rank to the end on the last one.
    pub seconds: f64,
    /// Activities that determined the length of the step, longest first. They add up to the step.
    pub critical_path: Vec<PathPart>,
    /// The summary of each rank.
    pub ranks: Vec<RankSummary>,
    /// Exposed communication by place, longest first.
    pub exposed: Vec<UnitWait>,
    /// The rank whose own work took longest, if it stands out.
    pub slowest: Option<Slowest>,
    /// Collectives by kind.
    pub operations: Vec<OperationSummary>,
}

impl Summary {
    /// Summarises `trace`.
    pub fn of(trace: &Trace) -> Self {
        let calls = Calls::new(trace);
        let mut machines: Vec<String> = Vec::new();
        for rank in &trace.ranks {
            if !machines.contains(&rank.node) {
                machines.push(rank.node.clone());
            }
        }
        let errors: Option<Vec<u64>> = trace.ranks.iter().map(|rank| rank.clock_error).collect();
        let mut numbers: Vec<u64> =
            trace.ranks.iter().flat_map(|rank| rank.steps.iter().map(|step| step.step)).collect();
        numbers.sort_unstable();
        numbers.dedup();
        let summarise = |number| {
            let steps = trace.ranks.iter().map(|rank| {
                Some(RankStep { rank, step: rank.steps.iter().find(|step| step.step == number)? })
            });
            Some(step_summary(&steps.collect::<Option<Vec<_>>>()?, &calls))
        };
        Summary {
            machines,
            clock_error_s: errors.map(|errors| seconds(errors.into_iter().max().unwrap_or(0))),
            steps: numbers.into_iter().filter_map(summarise).collect(),
            gpus: trace.ranks.iter().filter_map(gpu::summarise).collect(),
            kernels: gpu::kernels(&trace.ranks),
        }
    }
}

fn step_summary(all: &[RankStep<'_>], calls: &Calls<'_>) -> StepSummary {
    let start = all.iter().map(|of| of.step.start).min().unwrap_or(0);
    let end = all.iter().map(|of| of.step.end).max().unwrap_or(start);
    StepSummary {
        step: all.first().map_or(0, |of| of.step.step),
        seconds: seconds(end.saturating_sub(start)),
        critical_path: path::critical_path(all, start, calls),
        ranks: all.iter().map(|of| ranks::summarise(*of, start)).collect(),
        exposed: ranks::exposed(all),
        slowest: ranks::slowest(all, start),
        operations: ranks::operations(all, calls),
    }
}
