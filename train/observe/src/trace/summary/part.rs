//! A step of one rank, and how its parts are told.

use crate::trace::model::{RankTrace, StepTrace};

/// A step of one rank.
#[derive(Clone, Copy)]
pub(super) struct RankStep<'a> {
    pub(super) rank: &'a RankTrace,
    pub(super) step: &'a StepTrace,
}

/// Nanoseconds as seconds.
pub(super) fn seconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e9
}

/// A part of a step in words, as in `backward of layers.3`.
pub(super) fn place(activity: &str, unit: Option<&str>) -> String {
    unit.map_or_else(|| activity.to_owned(), |unit| format!("{activity} of {unit}"))
}
