//! The critical path of a step: the chain of work and communication that ends last.
//!
//! It is traced backwards from its end, starting on the rank whose step ends last. The activity that ended
//! then began at some time, at which the rank's previous activity ended. If the rank waited for a collective,
//! another rank may have issued it later: the path then continues on that rank, with its activity up to that
//! time. The time between the arrival of the last rank and the end of a wait is communication.

use std::collections::HashMap;

use serde::Serialize;

use super::step::{RankStep, place, seconds};
use crate::trace::model::{Calls, RankTrace};

/// A part of the critical path of a step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PathPart {
    /// The rank that was working, or waiting for the communication.
    pub rank: usize,
    /// The activity, as in `backward of layers.3` or `all_gather layers.3`.
    pub what: String,
    /// True if the part is communication.
    pub is_communication: bool,
    /// Duration in seconds.
    pub seconds: f64,
}

/// Returns the parts of the critical path of a step recorded by `all` ranks, the longest first. The first
/// rank began the step at `start`.
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
    // Every iteration goes back in time.
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
        // The rank on which the path begins was late, or its activity was not recorded.
        add(rank, "not recorded".to_owned(), false, now.saturating_sub(step.start));
        add(rank, "late start".to_owned(), false, step.start.min(now).saturating_sub(start));
    }
    parts.retain(|part| part.seconds > 0.0);
    parts.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    parts
}
