//! A step of one rank.

use crate::trace::model::{RankTrace, StepTrace};

#[derive(Clone, Copy)]
pub(super) struct RankStep<'a> {
    pub(super) rank: &'a RankTrace,
    pub(super) step: &'a StepTrace,
}

pub(super) fn seconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e9
}

/// Describes a part of a step, as in `backward of layers.3`.
pub(super) fn place(activity: &str, module: Option<&str>) -> String {
    module.map_or_else(|| activity.to_owned(), |module| format!("{activity} of {module}"))
}

pub(super) fn covered(times: impl Iterator<Item = (u64, u64)>) -> u64 {
    let mut times: Vec<_> = times.collect();
    times.sort_unstable();
    let (mut sum, mut until) = (0, 0);
    for (start, end) in times {
        sum += end.saturating_sub(start.max(until));
        until = until.max(end);
    }
    sum
}
