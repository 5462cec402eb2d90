//! The critical path of a step: the chain of work and communication that ends last.
//!
//! The path is traced backwards from the last rank's end. A wait whose collective another rank issued later continues
//! the path on that rank. The time from the last rank's arrival to the end of a wait counts as communication.

use std::collections::HashMap;

use serde::Serialize;

use super::step::{RankStep, place, seconds};
use crate::trace::model::{Calls, RankTrace};

/// A part of the critical path.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PathPart {
    /// The rank that worked, or waited for the communication.
    pub rank: usize,
    /// Activity, as in `backward of layers.3` or `all_gather layers.3`.
    pub what: String,
    /// True if the part is communication.
    pub is_communication: bool,
    /// Duration in seconds.
    pub seconds: f64,
}

/// Returns the parts of the critical path, longest first. The first rank began the step at `start`.
pub(super) fn critical_path(all: &[RankStep<'_>], start: u64, calls: &Calls<'_>) -> Vec<PathPart> {
    let Some(RankStep { mut rank, mut step }) = all.iter().max_by_key(|of| of.step.end).copied() else {
        return Vec::new();
    };
    let ranks: HashMap<usize, RankStep<'_>> = all.iter().map(|of| (of.rank.rank, *of)).collect();
    let mut now = step.end;
    let mut parts: Vec<PathPart> = Vec::new();
    let mut add = |rank: &RankTrace, what: String, is_communication: bool, nanoseconds: u64| {
        let seconds = seconds(nanoseconds);
        match parts.iter_mut().find(|part| part.rank == rank.rank && part.what == what) {
            Some(part) => part.seconds += seconds,
            None => parts.push(PathPart { rank: rank.rank, what, is_communication, seconds }),
        }
    };
    while now > step.start {
        let after = step.spans.partition_point(|span| span.start < now);
        let Some(span) = after.checked_sub(1).and_then(|before| step.spans.get(before)) else { break };
        let Some((group, sequence)) = &span.waits_for else {
            add(rank, place(&span.activity, span.module.as_deref()), false, now - span.start);
            now = span.start;
            continue;
        };
        let last = calls.last(rank, group, *sequence);
        let what = match last {
            Some((_, call)) => format!("{} {}", call.operation, call.scope),
            None => format!("operation {sequence} of {group}"),
        };
        let later = last
            .filter(|(last, call)| *last != rank.rank && call.enqueued > span.start && call.enqueued < now);
        match later.and_then(|(last, call)| Some((ranks.get(&last)?, call.enqueued))) {
            Some((last, arrived)) => {
                add(rank, what, true, now - arrived);
                now = arrived;
                (rank, step) = (last.rank, last.step);
            }
            None => {
                add(rank, what, true, now - span.start);
                now = span.start;
            }
        }
    }
    if now > start {
        // The first rank on the path was late, or its activity was not recorded.
        add(rank, "not recorded".to_owned(), false, now.saturating_sub(step.start));
        add(rank, "late start".to_owned(), false, step.start.min(now).saturating_sub(start));
    }
    parts.retain(|part| part.seconds > 0.0);
    parts.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    parts
}
