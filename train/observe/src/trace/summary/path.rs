//! The critical path of a step: the chain of work and communication that ends last.
//!
//! It is traced backwards from its end, starting on the rank whose step ends last. The activity that ended
//! then began at some time, at which the rank's previous activity ended. If the rank waited for a collective,
//! another rank may have issued it later: the path then continues on that rank, with its activity up to that
//! time. The time between the arrival of the last rank and the end of a wait is communication.

use std::collections::HashMap;

use serde::Serialize;

use super::part::{RankStep, place, seconds};
use crate::trace::calls::Calls;
use crate::trace::model::{RankTrace, SpanTrace, Trace};

/// A part of the critical path of a step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PathPart {
    /// The rank that was working, or waiting for the communication.
    pub rank: usize,
    /// The activity, as in `backward of layers.3` or `all_gather layers.3`.
    pub what: String,
    /// True if the part is communication.
    pub is_communication: bool,
    /// Its share of the step, in seconds.
    pub seconds: f64,
}

/// Returns the parts of the critical path of a step recorded by `all` ranks, the longest first. The first
/// rank began the step at `start`.
pub(super) fn critical_path(
    trace: &Trace,
    all: &[RankStep<'_>],
    start: u64,
    calls: &Calls<'_>,
) -> Vec<PathPart> {
    let Some(last) = all.iter().max_by_key(|of| of.step.end) else { return Vec::new() };
    let spans: HashMap<usize, Spans<'_>> =
        all.iter().map(|of| (of.rank.rank, Spans { spans: &of.step.spans, start: of.step.start })).collect();
    let ranks: HashMap<usize, &RankTrace> = trace.ranks.iter().map(|rank| (rank.rank, rank)).collect();
    let (mut rank, mut now) = (last.rank, last.step.end);
    let mut parts: Vec<PathPart> = Vec::new();
    let mut add = |rank: &RankTrace, what: String, is_communication: bool, nanoseconds: u64| {
        let known = parts.iter_mut().find(|part| part.rank == rank.rank && part.what == what);
        match known {
            Some(part) => part.seconds += seconds(nanoseconds),
            None => parts.push(PathPart {
                rank: rank.rank,
                what,
                is_communication,
                seconds: seconds(nanoseconds),
            }),
        }
    };
    // Every iteration goes back in time.
    while let Some(span) = spans.get(&rank.rank).and_then(|spans| spans.before(now)) {
        let begun = span.start;
        let Some((group, sequence)) = &span.waits_for else {
            add(rank, place(&span.activity, span.unit.as_deref()), false, now - begun);
            now = begun;
            continue;
        };
        let last = calls.last(rank, group, *sequence);
        let what = last.map(|(_, call)| format!("{} {}", call.operation, call.scope));
        let what = what.unwrap_or_else(|| format!("operation {sequence} of {group}"));
        let came_later = last.filter(|(last, call)| {
            let is_known = ranks.contains_key(last) && *last != rank.rank;
            is_known && call.enqueued > begun && call.enqueued < now
        });
        match came_later {
            Some((last, call)) => {
                add(rank, what, true, now - call.enqueued);
                now = call.enqueued;
                rank = ranks[&last];
            }
            None => {
                add(rank, what, true, now - begun);
                now = begun;
            }
        }
    }
    if now > start {
        // The rank on which the path begins was late, or its activity was not recorded.
        let begun = spans.get(&rank.rank).map_or(start, |spans| spans.start);
        add(rank, "not recorded".to_owned(), false, now.saturating_sub(begun));
        add(rank, "late start".to_owned(), false, begun.min(now).saturating_sub(start));
    }
    parts.retain(|part| part.seconds > 0.0);
    parts.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    parts
}

/// The spans of a rank's step.
struct Spans<'a> {
    spans: &'a [SpanTrace],
    start: u64,
}

impl<'a> Spans<'a> {
    /// Returns the activity just before `time`, unless it was before the step.
    fn before(&self, time: u64) -> Option<&'a SpanTrace> {
        let after = self.spans.partition_point(|span| span.start < time);
        let span = self.spans.get(after.checked_sub(1)?)?;
        (time > self.start).then_some(span)
    }
}
