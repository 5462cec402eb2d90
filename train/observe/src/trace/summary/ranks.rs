//! Compares the ranks of a step, and sums up collectives by kind.

use std::collections::BTreeMap;

use serde::Serialize;

use super::step::{RankStep, covered, place, seconds};
use crate::trace::model::{Calls, SpanTrace, track_of};

/// A breakdown of a step's time on one rank, in seconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RankSummary {
    /// Rank in the world.
    pub rank: usize,
    /// Name of the rank's machine.
    pub machine: String,
    /// Delay of the step's start relative to the first rank.
    pub late_s: f64,
    /// Length of the step.
    pub step_s: f64,
    /// Time in which the rank's thread computed.
    pub computing_s: f64,
    /// Time for loading data.
    pub data_s: f64,
    /// Time for saving a checkpoint.
    pub checkpoint_s: f64,
    /// Time spent waiting for collectives: exposed communication.
    pub exposed_s: f64,
    /// Time in which a collective was running, including time lost to late ranks.
    pub communicating_s: f64,
    /// Share of `communicating_s` in which the rank's thread did not wait; `None` without communication.
    pub overlap: Option<f64>,
}

/// Time that ranks waited at one place of a step, in seconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct UnitWait {
    /// Place, as in `backward of layers.3`.
    pub place: String,
    /// Mean over the ranks.
    pub mean_s: f64,
    /// Longest wait of a rank.
    pub most_s: f64,
}

/// The rank that other ranks wait for.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Slowest {
    /// Rank in the world.
    pub rank: usize,
    /// Name of the rank's machine.
    pub machine: String,
    /// Seconds by which the rank's work, including a late start, exceeded the median of the other ranks.
    pub excess_s: f64,
    /// Work that took longer, largest difference first.
    pub reasons: Vec<WorkDifference>,
}

/// Work that took longer on one rank than on the others.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WorkDifference {
    /// The work, as in `backward of layers.3`, `data loading` or `late start`.
    pub what: String,
    /// Seconds on the slow rank.
    pub seconds: f64,
    /// Median seconds of the other ranks.
    pub others_s: f64,
}

/// Collectives of one kind in a step, on all ranks.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct OperationSummary {
    /// Kind of operation, such as `all_gather`.
    pub operation: String,
    /// Number of calls.
    pub calls: u64,
    /// Bytes that the ranks would send on a ring.
    pub bytes_sent: u64,
    /// Seconds from the arrival of the last rank to the end.
    pub moving_s: f64,
    /// Seconds that earlier ranks spent waiting for the last rank.
    pub late_s: f64,
    /// Seconds in the queue behind other collectives of the group.
    pub queued_s: f64,
    /// `bytes_sent` by `moving_s`, in 10⁹ bytes per second and rank; `None` if nothing is sent.
    pub gb_per_s: Option<f64>,
}

/// Smaller shares are not reported.
const MINOR: f64 = 0.02;

const REASONS: usize = 4;

fn is_work(span: &&SpanTrace) -> bool {
    span.waits_for.is_none()
}

pub(super) fn summarise(RankStep { rank, step }: RankStep<'_>, start: u64) -> RankSummary {
    let (work, waits): (Vec<_>, Vec<_>) = step.spans.iter().partition(is_work);
    let time = |spans: &[&SpanTrace]| seconds(spans.iter().map(|span| span.duration()).sum());
    let worked = |track: &str| {
        let of_track = work.iter().filter(|span| track_of(&span.activity) == track);
        time(&of_track.copied().collect::<Vec<_>>())
    };
    let exposed_s = time(&waits);
    let communicating_s = seconds(covered(step.collectives.iter().map(|call| (call.started, call.finished))));
    RankSummary {
        rank: rank.rank,
        machine: rank.node.clone(),
        late_s: seconds(step.start.saturating_sub(start)),
        step_s: seconds(step.end.saturating_sub(step.start)),
        computing_s: worked("compute"),
        data_s: worked("data"),
        checkpoint_s: worked("checkpoint"),
        exposed_s,
        communicating_s,
        overlap: (communicating_s > 0.0).then(|| (1.0 - exposed_s / communicating_s).max(0.0)),
    }
}

pub(super) fn exposed(all: &[RankStep<'_>]) -> Vec<UnitWait> {
    let mut by_place: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    for (index, of) in all.iter().enumerate() {
        for span in of.step.spans.iter().filter(|span| !is_work(span)) {
            let place = place(&span.activity, span.module.as_deref());
            by_place.entry(place).or_insert_with(|| vec![0; all.len()])[index] += span.duration();
        }
    }
    let waits = by_place.into_iter().map(|(place, by_rank)| UnitWait {
        place,
        mean_s: seconds(by_rank.iter().sum()) / all.len() as f64,
        most_s: seconds(by_rank.iter().copied().max().unwrap_or(0)),
    });
    let mut waits: Vec<_> = waits.collect();
    waits.sort_by(|a, b| b.mean_s.total_cmp(&a.mean_s));
    waits
}

/// Returns the rank whose own work took longest, if its work took noticeably longer than the median.
pub(super) fn slowest(all: &[RankStep<'_>], start: u64) -> Option<Slowest> {
    let work: Vec<BTreeMap<String, u64>> = all
        .iter()
        .map(|of| {
            let mut work = BTreeMap::from([("late start".to_owned(), of.step.start.saturating_sub(start))]);
            for span in of.step.spans.iter().filter(is_work) {
                *work.entry(place(&span.activity, span.module.as_deref())).or_default() += span.duration();
            }
            work
        })
        .collect();
    let total = |index: usize| work[index].values().sum::<u64>();
    let slowest = (0..all.len()).max_by_key(|index| total(*index))?;
    let others = || (0..all.len()).filter(|index| *index != slowest);
    let excess = seconds(total(slowest)) - median(others().map(total))?;
    let step = all.iter().map(|of| of.step.end.saturating_sub(of.step.start)).max().unwrap_or(0);
    if excess <= MINOR * seconds(step) {
        return None;
    }
    let difference = |(what, taken): (&String, &u64)| {
        let of_others = others().map(|index| work[index].get(what).copied().unwrap_or(0));
        let (seconds, others_s) = (seconds(*taken), median(of_others)?);
        Some(WorkDifference { what: what.clone(), seconds, others_s })
    };
    let mut reasons: Vec<_> = work[slowest].iter().filter_map(difference).collect();
    let by = |reason: &WorkDifference| reason.seconds - reason.others_s;
    reasons.retain(|reason| by(reason) > MINOR * excess);
    reasons.sort_by(|a, b| by(b).total_cmp(&by(a)));
    reasons.truncate(REASONS);
    let rank = all[slowest].rank;
    Some(Slowest { rank: rank.rank, machine: rank.node.clone(), excess_s: excess, reasons })
}

fn median(nanoseconds: impl Iterator<Item = u64>) -> Option<f64> {
    let mut all: Vec<u64> = nanoseconds.collect();
    all.sort_unstable();
    let upper = all.get(all.len() / 2)?;
    let lower = all[(all.len() - 1) / 2];
    Some((seconds(*upper) + seconds(lower)) / 2.0)
}

pub(super) fn operations(all: &[RankStep<'_>], calls: &Calls<'_>) -> Vec<OperationSummary> {
    let mut by_operation: BTreeMap<&str, OperationSummary> = BTreeMap::new();
    for of in all {
        for call in &of.step.collectives {
            let operation = call.operation.as_str();
            let sum = by_operation.entry(operation).or_insert_with(|| OperationSummary {
                operation: operation.to_owned(),
                ..OperationSummary::default()
            });
            let same = calls.get(of.rank, &call.group, call.sequence);
            let last = same.iter().map(|(_, call)| call.started).max().unwrap_or(call.started);
            let complete = last.min(call.finished).max(call.started);
            sum.calls += 1;
            sum.bytes_sent += call.bytes_sent;
            sum.moving_s += seconds(call.finished.saturating_sub(complete));
            sum.late_s += seconds(complete.saturating_sub(call.started));
            sum.queued_s += seconds(call.started.saturating_sub(call.enqueued));
        }
    }
    let mut sums: Vec<_> = by_operation.into_values().collect();
    for sum in &mut sums {
        let is_moved = sum.bytes_sent > 0 && sum.moving_s > 0.0;
        sum.gb_per_s = is_moved.then(|| sum.bytes_sent as f64 / sum.moving_s / 1e9);
    }
    sums.sort_by(|a, b| (b.moving_s + b.late_s).total_cmp(&(a.moving_s + a.late_s)));
    sums
}
