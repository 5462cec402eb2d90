//! What a trace holds, whether it is about to be written or was read: steps of all ranks on one clock.

use std::collections::BTreeMap;

/// Some steps of a run. All times are nanoseconds on the clock of rank 0's machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    /// The ranks, in ascending order.
    pub ranks: Vec<RankTrace>,
}

/// Some steps of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankTrace {
    /// Rank in the world.
    pub rank: usize,
    /// Machine that the rank runs on.
    pub node: String,
    /// By how much the rank's times may be off those of rank 0: zero on the same machine, and `None` if nothing tells.
    pub clock_error: Option<u64>,
    /// The groups that the rank belongs to, each with the world ranks of its members.
    pub groups: BTreeMap<String, Vec<usize>>,
    /// The steps, in ascending order.
    pub steps: Vec<StepTrace>,
    /// What its GPU did, in the order of its beginnings. It may lag behind the steps.
    pub gpu: Vec<GpuTrace>,
}

impl RankTrace {
    /// The step of this number, if it is there.
    pub fn step(&self, number: u64) -> Option<&StepTrace> {
        self.steps.iter().find(|step| step.step == number)
    }
}

/// One step of one rank, from its beginning to the beginning of the next one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepTrace {
    /// The optimizer step.
    pub step: u64,
    /// When it began.
    pub start: u64,
    /// When it ended.
    pub end: u64,
    /// What the rank's thread did, in order.
    pub spans: Vec<SpanTrace>,
    /// The collectives that were issued in the step, in the order of their start.
    pub collectives: Vec<CollectiveTrace>,
    /// Sums that the rank's recorder has kept by itself, by name: what those of the trace are held against.
    pub recorder: BTreeMap<String, u64>,
}

/// What a rank's thread did for a while.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpanTrace {
    /// Such as `forward`.
    pub activity: String,
    /// The module that it was in.
    pub unit: Option<String>,
    /// The collective that it waited for, by group and number.
    pub waits_for: Option<(String, u64)>,
    /// When it began.
    pub start: u64,
    /// When it ended.
    pub end: u64,
    /// Bytes that the rank held at the end, where they are counted.
    pub bytes: Option<u64>,
}

impl SpanTrace {
    /// How long it took, in nanoseconds.
    pub fn duration(&self) -> u64 {
        self.end.saturating_sub(self.start)
    }
}

/// What a GPU did for a while.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuTrace {
    /// The kernel's name, or the kind of copy.
    pub name: String,
    /// Number of the stream.
    pub stream: u32,
    /// Bytes that were copied or filled.
    pub bytes: Option<u64>,
    /// When it began.
    pub start: u64,
    /// When it ended.
    pub end: u64,
}

/// A collective of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CollectiveTrace {
    /// Such as `all_gather`.
    pub operation: String,
    /// The part of the model that it is for, such as `layers.3`.
    pub scope: String,
    /// The part of the step that it belongs to, such as `forward`.
    pub phase: String,
    /// Name of the group.
    pub group: String,
    /// Number of the operation in its group, the same on every rank of it.
    pub sequence: u64,
    /// Element type.
    pub dtype: String,
    /// Bytes of the whole tensor.
    pub bytes: u64,
    /// Bytes that the rank would send on a ring.
    pub bytes_sent: u64,
    /// When the rank's thread issued it.
    pub enqueued: u64,
    /// When it reached the head of its group's queue.
    pub started: u64,
    /// When it ended. The end of the step if it had not ended when the trace was taken.
    pub finished: u64,
    /// Whether it had ended by then.
    pub is_finished: bool,
}

impl CollectiveTrace {
    /// How long it ran, in nanoseconds, waiting for other ranks included.
    pub fn duration(&self) -> u64 {
        self.finished.saturating_sub(self.started)
    }

    /// Bytes per second that the rank sent, in units of 10⁹; zero if nothing was sent.
    pub fn bandwidth(&self) -> f64 {
        // Bytes per nanosecond.
        self.bytes_sent as f64 / self.duration().max(1) as f64
    }
}

/// The track of a rank that a slice of its thread is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ThreadTrack {
    Compute,
    Waits,
    Data,
    Checkpoint,
}

impl ThreadTrack {
    pub(super) const ALL: [ThreadTrack; 4] =
        [ThreadTrack::Compute, ThreadTrack::Waits, ThreadTrack::Data, ThreadTrack::Checkpoint];

    /// The track of what a rank does when it does not wait.
    pub(super) fn of_activity(activity: &str) -> ThreadTrack {
        match activity {
            "data loading" => ThreadTrack::Data,
            "checkpoint" | "saving" => ThreadTrack::Checkpoint,
            _ => ThreadTrack::Compute,
        }
    }

    pub(super) fn name(self) -> &'static str {
        ["compute", "waits", "data", "checkpoint"][self as usize]
    }
}
