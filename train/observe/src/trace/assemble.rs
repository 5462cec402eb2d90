//! Builds a trace from the recordings of the ranks.

use std::collections::BTreeMap;

use kiln_collectives::{Operation, Record, Span, StepTimeline};
use serde::{Deserialize, Serialize};

use super::align::{CallTimes, Offset, RankClock, offsets};
use super::model::{CollectiveTrace, GpuTrace, RankTrace, SpanTrace, StepTrace, Trace};

/// Recorded steps of one rank, as sent to rank 0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RecordedRank {
    /// World ranks of each group that the rank belongs to.
    pub groups: BTreeMap<String, Vec<usize>>,
    /// The steps, in order; not empty.
    pub steps: Vec<RecordedStep>,
    /// Activities of the rank's GPU, ordered by start.
    #[serde(default)]
    pub gpu: Vec<GpuActivity>,
}

/// An activity of a GPU: a kernel, a copy or a fill.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GpuActivity {
    /// Name of the kernel, or kind of copy.
    pub name: String,
    /// Number of the stream.
    pub stream: u32,
    /// Bytes copied or filled.
    pub bytes: Option<u64>,
    /// Start, in seconds on the machine's monotonic clock.
    pub start: f64,
    /// End, on the same clock.
    pub end: f64,
}

/// A recorded step of a rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RecordedStep {
    /// Activities and collectives of the rank.
    pub timeline: StepTimeline,
    /// See [`StepTrace::recorder`].
    pub sums: BTreeMap<String, u64>,
}

impl Trace {
    /// Builds the trace of `ranks`, on the clock of the first rank's machine. Ranks without steps are omitted.
    pub fn from_ranks(ranks: &[RecordedRank]) -> Trace {
        let ranks: Vec<_> = ranks.iter().filter(|rank| !rank.steps.is_empty()).collect();
        let clocks: Vec<_> = ranks.iter().map(|rank| rank_clock(rank)).collect();
        let assemble = |(rank, offset): (&&RecordedRank, Offset)| {
            let first = &rank.steps[0].timeline;
            RankTrace {
                rank: first.rank,
                node: first.node.clone(),
                clock_error: offset.error.map(nanoseconds),
                groups: rank.groups.clone(),
                steps: rank.steps.iter().map(|step| step_trace(step, offset.seconds)).collect(),
                gpu: rank.gpu.iter().map(|activity| gpu_trace(activity, offset.seconds)).collect(),
            }
        };
        let mut ranks: Vec<_> = ranks.iter().zip(offsets(&clocks)).map(assemble).collect();
        ranks.sort_by_key(|rank| rank.rank);
        Trace { ranks }
    }
}

fn rank_clock(rank: &RecordedRank) -> RankClock<'_> {
    let mut calls = BTreeMap::new();
    for RecordedStep { timeline, .. } in &rank.steps {
        for record in &timeline.records {
            let needs_all = !matches!(record.operation, Operation::Broadcast | Operation::Split);
            let times = record.started.zip(record.finished).filter(|_| needs_all);
            let (Some(ranks), Some((started, finished))) = (rank.groups.get(&*record.group), times) else {
                continue;
            };
            let key = (ranks.clone(), record.group.to_string(), record.sequence);
            let times = CallTimes {
                started: timeline.created + started.as_secs_f64(),
                finished: timeline.created + finished.as_secs_f64(),
                ends_together: matches!(record.operation, Operation::AllReduce | Operation::Barrier),
            };
            calls.insert(key, times);
        }
    }
    RankClock { node: &rank.steps[0].timeline.node, calls }
}

fn nanoseconds(seconds: f64) -> u64 {
    // Negative values and NaN become 0.
    (seconds * 1e9).round() as u64
}

fn gpu_trace(activity: &GpuActivity, ahead: f64) -> GpuTrace {
    let start = nanoseconds(activity.start - ahead);
    GpuTrace {
        name: activity.name.clone(),
        stream: activity.stream,
        bytes: activity.bytes,
        start,
        end: nanoseconds(activity.end - ahead).max(start),
    }
}

fn step_trace(step: &RecordedStep, ahead: f64) -> StepTrace {
    let StepTimeline { step: number, start, end, created, spans, records, .. } = &step.timeline;
    let at = |seconds: f64| nanoseconds(seconds + (created - ahead));
    let (start, end) = (at(*start), at(*end));
    let has_bytes = spans.iter().any(|span| span.bytes > 0);
    let span = |span: &Span| SpanTrace {
        activity: span.activity.clone(),
        module: span.module.clone(),
        waits_for: span.waits_for.clone(),
        start: at(span.start).clamp(start, end),
        end: at(span.end).clamp(start, end),
        bytes: has_bytes.then_some(span.bytes),
    };
    let collective = |record: &Record| {
        let time = |time: Option<std::time::Duration>| time.map(|time| at(time.as_secs_f64()));
        let enqueued = time(record.enqueued).unwrap_or(start);
        let started = time(record.started)?.max(enqueued);
        let finished = time(record.finished);
        Some(CollectiveTrace {
            operation: record.operation.to_string(),
            scope: record.label.scope.to_string(),
            phase: record.label.phase.to_string(),
            group: record.group.to_string(),
            sequence: record.sequence,
            dtype: record.dtype.to_string(),
            bytes: (record.count * record.dtype.size()) as u64,
            bytes_sent: record.bytes_sent,
            enqueued,
            started,
            finished: finished.unwrap_or(end).max(started),
            is_finished: finished.is_some(),
        })
    };
    let mut collectives: Vec<_> = records.iter().filter_map(collective).collect();
    collectives.sort_by_key(|collective| (collective.started, collective.sequence));
    StepTrace {
        step: *number,
        start,
        end,
        spans: spans.iter().map(span).collect(),
        collectives,
        recorder: step.sums.clone(),
    }
}
