//! The contents of a trace: steps of all ranks on one clock.

use std::collections::{BTreeMap, HashMap};

/// Some steps of a run. All times are nanoseconds on the clock of rank 0's machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    /// The ranks, ascending.
    pub ranks: Vec<RankTrace>,
}

/// Some steps of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankTrace {
    /// Rank in the world.
    pub rank: usize,
    /// Name of the rank's machine.
    pub node: String,
    /// Error bound of the rank's times relative to rank 0: zero on the same machine, and `None` if unknown.
    pub clock_error: Option<u64>,
    /// World ranks of each group that the rank belongs to.
    pub groups: BTreeMap<String, Vec<usize>>,
    /// The steps, ascending.
    pub steps: Vec<StepTrace>,
    /// Activities of the rank's GPU, ordered by start. They may lag behind the steps.
    pub gpu: Vec<GpuTrace>,
}

/// One step of one rank, from its start to the start of the next one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepTrace {
    /// The optimizer step.
    pub step: u64,
    /// Start of the step.
    pub start: u64,
    /// End of the step.
    pub end: u64,
    /// Activities of the rank's thread, in order.
    pub spans: Vec<SpanTrace>,
    /// Collectives issued in the step, ordered by start.
    pub collectives: Vec<CollectiveTrace>,
    /// Sums by name, counted independently by the rank's recorder, to check the trace.
    pub recorder: BTreeMap<String, u64>,
}

/// An activity of a rank's thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpanTrace {
    /// Kind of activity, such as `forward`.
    pub activity: String,
    /// The module that was active.
    pub module: Option<String>,
    /// The collective that the thread waited for, by group and sequence number.
    pub waits_for: Option<(String, u64)>,
    /// Start of the activity.
    pub start: u64,
    /// End of the activity.
    pub end: u64,
    /// Bytes that the rank held at the end, if counted.
    pub bytes: Option<u64>,
}

impl SpanTrace {
    /// Returns the duration in nanoseconds.
    pub fn duration(&self) -> u64 {
        self.end.saturating_sub(self.start)
    }
}

/// An activity of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuTrace {
    /// Name of the kernel, or kind of copy.
    pub name: String,
    /// Number of the stream.
    pub stream: u32,
    /// Bytes copied or filled.
    pub bytes: Option<u64>,
    /// Start of the activity.
    pub start: u64,
    /// End of the activity.
    pub end: u64,
}

/// A collective of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CollectiveTrace {
    /// Kind of operation, such as `all_gather`.
    pub operation: String,
    /// Part of the model whose data is moved, such as `layers.3`.
    pub scope: String,
    /// Part of the step, such as `forward`.
    pub phase: String,
    /// Name of the group.
    pub group: String,
    /// Sequence number in the group, the same on all its ranks.
    pub sequence: u64,
    /// Element type.
    pub dtype: String,
    /// Bytes of the whole tensor.
    pub bytes: u64,
    /// Bytes that the rank would send on a ring.
    pub bytes_sent: u64,
    /// Time at which the rank's thread issued the collective.
    pub enqueued: u64,
    /// Time at which the collective reached the head of its group's queue.
    pub started: u64,
    /// End of the collective, or of the step if the collective had not ended by then.
    pub finished: u64,
    /// True if the collective had ended when the trace was taken.
    pub is_finished: bool,
}

pub(super) const THREAD_TRACKS: [&str; 4] = ["compute", "waits", "data", "checkpoint"];

pub(super) fn track_of(activity: &str) -> &'static str {
    match activity {
        "data loading" => "data",
        "checkpoint" | "saving" => "checkpoint",
        _ => "compute",
    }
}

type CallKey<'a> = (&'a [usize], &'a str, u64);

/// Collectives of a trace, each with the ranks that recorded it.
pub(super) struct Calls<'a>(HashMap<CallKey<'a>, Vec<(usize, &'a CollectiveTrace)>>);

impl<'a> Calls<'a> {
    pub(super) fn new(trace: &'a Trace) -> Self {
        let mut by_key: HashMap<_, Vec<_>> = HashMap::new();
        for rank in &trace.ranks {
            for collective in rank.steps.iter().flat_map(|step| &step.collectives) {
                if let Some(ranks) = rank.groups.get(&collective.group) {
                    let key = (ranks.as_slice(), collective.group.as_str(), collective.sequence);
                    by_key.entry(key).or_default().push((rank.rank, collective));
                }
            }
        }
        Calls(by_key)
    }

    pub(super) fn get(
        &self,
        rank: &'a RankTrace,
        group: &'a str,
        sequence: u64,
    ) -> &[(usize, &'a CollectiveTrace)] {
        let ranks = rank.groups.get(group).map_or(&[][..], Vec::as_slice);
        self.0.get(&(ranks, group, sequence)).map_or(&[], Vec::as_slice)
    }

    pub(super) fn last(
        &self,
        rank: &'a RankTrace,
        group: &'a str,
        sequence: u64,
    ) -> Option<(usize, &'a CollectiveTrace)> {
        self.get(rank, group, sequence).iter().copied().max_by_key(|(_, collective)| collective.enqueued)
    }
}
