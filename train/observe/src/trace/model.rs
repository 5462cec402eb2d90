//! The contents of a trace, to be written or read back: steps of all ranks on one clock.

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
    /// Error bound of the rank's times relative to rank 0: zero on the same machine, and `None` if unknown.
    pub clock_error: Option<u64>,
    /// The groups that the rank belongs to, each with the world ranks of its members.
    pub groups: BTreeMap<String, Vec<usize>>,
    /// The steps, in ascending order.
    pub steps: Vec<StepTrace>,
    /// The activities of its GPU, ordered by start. They may lag behind the steps.
    pub gpu: Vec<GpuTrace>,
}

impl RankTrace {
    /// Returns the step with this number, if it exists.
    pub fn step(&self, number: u64) -> Option<&StepTrace> {
        self.steps.iter().find(|step| step.step == number)
    }
}

/// One step of one rank, from its beginning to the beginning of the next one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepTrace {
    /// The optimizer step.
    pub step: u64,
    /// Its beginning.
    pub start: u64,
    /// Its end.
    pub end: u64,
    /// The activities of the rank's thread, in order.
    pub spans: Vec<SpanTrace>,
    /// The collectives issued in the step, ordered by start.
    pub collectives: Vec<CollectiveTrace>,
    /// Sums kept by the rank's recorder independently, by name; the trace's own sums are checked against
    /// them.
    pub recorder: BTreeMap<String, u64>,
}

/// An activity of a rank's thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpanTrace {
    /// The kind of activity, such as `forward`.
    pub activity: String,
    /// The module during the activity.
    pub unit: Option<String>,
    /// The collective that the thread waited for, by group and number.
    pub waits_for: Option<(String, u64)>,
    /// The start.
    pub start: u64,
    /// The end.
    pub end: u64,
    /// Bytes that the rank held at the end, where they are counted.
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
    /// The kernel's name, or the kind of copy.
    pub name: String,
    /// Number of the stream.
    pub stream: u32,
    /// Number of bytes copied or filled.
    pub bytes: Option<u64>,
    /// The start.
    pub start: u64,
    /// The end.
    pub end: u64,
}

/// A collective of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CollectiveTrace {
    /// The kind of operation, such as `all_gather`.
    pub operation: String,
    /// The part of the model that it is for, such as `layers.3`.
    pub scope: String,
    /// The part of the step that it belongs to, such as `forward`.
    pub phase: String,
    /// Name of the group.
    pub group: String,
    /// Number of the operation in its group, the same on every rank of the group.
    pub sequence: u64,
    /// Element type.
    pub dtype: String,
    /// Bytes of the whole tensor.
    pub bytes: u64,
    /// Bytes that the rank would send on a ring.
    pub bytes_sent: u64,
    /// The time at which the rank's thread issued it.
    pub enqueued: u64,
    /// The time at which it reached the head of its group's queue.
    pub started: u64,
    /// The end; that of the step if it had not ended when the trace was taken.
    pub finished: u64,
    /// True if it had ended when the trace was taken.
    pub is_finished: bool,
}

impl CollectiveTrace {
    /// Returns how long it ran in nanoseconds, including the wait for other ranks.
    pub fn duration(&self) -> u64 {
        self.finished.saturating_sub(self.started)
    }

    /// Returns the bytes per second that the rank sent, in units of 10⁹; zero if nothing was sent.
    pub fn bandwidth(&self) -> f64 {
        // Bytes per nanosecond.
        self.bytes_sent as f64 / self.duration().max(1) as f64
    }
}

/// The track for a slice of a rank's thread.
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

    /// Returns the track of a rank's activities other than waits.
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
