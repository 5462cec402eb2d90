//! A snapshot of one rank's communication, to be sent or stored.

use crate::call::Call;
use crate::dtype::DType;
use crate::label::{Label, text};
use crate::operation::Operation;
use crate::verdict::Verdict;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;

/// A rank's activity other than communication.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Activity {
    /// Name, such as `"data loading"` or `"backward"`.
    pub name: String,
    /// Seconds since it began.
    pub seconds: f64,
}

/// One operation of one rank. Times count from the creation of the recorder and serialize as seconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Number of the operation in its group, from 0; equal on every rank.
    pub sequence: u64,
    /// Name of the group.
    #[serde(with = "text")]
    pub group: Arc<str>,
    /// Kind of operation.
    pub operation: Operation,
    /// Purpose of the operation.
    pub label: Label,
    /// Element type.
    pub dtype: DType,
    /// Elements of the full tensor: the output of an all-gather, the input of a reduce-scatter, else the buffer.
    pub count: usize,
    /// Bytes that this rank would send on a ring; see [`Operation::ring_bytes`]. 0 for invalid calls.
    pub bytes_sent: u64,
    /// Time of the call.
    #[serde(with = "seconds")]
    pub enqueued: Option<Duration>,
    /// Time at the head of its group's queue.
    #[serde(with = "seconds")]
    pub started: Option<Duration>,
    /// Time of completion; `None` if it failed.
    #[serde(with = "seconds")]
    pub finished: Option<Duration>,
}

impl Record {
    pub(crate) fn times(&self) -> [Duration; 2] {
        let between = |from: Option<Duration>, to: Option<Duration>| {
            from.zip(to).map_or(Duration::ZERO, |(from, to)| to.saturating_sub(from))
        };
        [between(self.enqueued, self.started), between(self.started, self.finished)]
    }
}

/// An operation that a rank has issued and not finished.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pending {
    /// Number of the operation in its group.
    pub sequence: u64,
    /// The rank's call.
    pub call: Call,
    /// Seconds since the call.
    pub seconds: f64,
}

/// A rank's view of one of its groups.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupFlight {
    /// Name of the group.
    pub name: String,
    /// World rank of each rank of the group.
    pub ranks: Vec<usize>,
    /// Number of issued operations; also the number of the next one.
    pub issued: u64,
    /// Unfinished operations, in order.
    pub pending: Vec<Pending>,
}

/// The flight recorder of one rank at one moment, as in the files `flight/rank_*.json` of a run folder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Flight {
    /// Rank in the world.
    pub rank: usize,
    /// Number of ranks in the world.
    pub world_size: usize,
    /// Backend of the communicator.
    pub backend: String,
    /// Name of the rank's machine.
    pub node: String,
    /// Process id.
    pub process: u32,
    /// The rank's activity other than communication.
    pub activity: Activity,
    /// The rank's groups, the world first.
    pub groups: Vec<GroupFlight>,
    /// The verdict that all ranks share, if a failure was diagnosed.
    pub verdict: Option<Verdict>,
    /// The rank's last operations, oldest first.
    pub records: Vec<Record>,
    /// Time of the snapshot, in seconds on the clock of `records`; 0 in old files.
    #[serde(default)]
    pub clock: f64,
    /// The last period in which the process was not running, if known.
    #[serde(default)]
    pub stall: Option<Stall>,
}

/// A period in which a process was not running.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stall {
    /// Length in seconds.
    pub seconds: f64,
    /// Seconds since its end.
    pub ago: f64,
}

impl Flight {
    /// Returns the flight as it would be after another `seconds` without events.
    pub(crate) fn later(mut self, seconds: f64) -> Flight {
        self.clock += seconds;
        self.activity.seconds += seconds;
        let pending = self.groups.iter_mut().flat_map(|group| &mut group.pending);
        pending.for_each(|pending| pending.seconds += seconds);
        if let Some(stall) = &mut self.stall {
            stall.ago += seconds;
        }
        self
    }
}

/// Serializes times as seconds. Rejects impossible values.
mod seconds {
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
    use std::time::Duration;

    pub(super) fn serialize<S: Serializer>(
        time: &Option<Duration>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        time.map(|time| time.as_secs_f64()).serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
        let time = Option::<f64>::deserialize(from)?.map(Duration::try_from_secs_f64);
        time.transpose().map_err(de::Error::custom)
    }
}
