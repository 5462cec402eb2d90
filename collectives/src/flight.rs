//! What one rank knows when something goes wrong, in a form that can be sent and written down.

use crate::call::Call;
use crate::recorder::Record;
use crate::verdict::Verdict;
use serde::{Deserialize, Serialize};

/// What a rank does besides communicating.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Activity {
    /// Such as `"data loading"` or `"backward"`.
    pub name: String,
    /// For how long, in seconds.
    pub seconds: f64,
}

/// An operation that a rank has issued and that has not finished.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pending {
    /// Number of the operation in its group.
    pub sequence: u64,
    /// What was called.
    pub call: Call,
    /// Since when, in seconds.
    pub seconds: f64,
}

/// A rank's view of one of its groups.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupFlight {
    /// Name of the group.
    pub name: String,
    /// World rank of each member.
    pub ranks: Vec<usize>,
    /// Operations issued so far; also the number of the next one.
    pub issued: u64,
    /// Operations not finished, in order.
    pub pending: Vec<Pending>,
}

/// The flight recorder of one rank at one moment.
///
/// Serializes to the files `flight/rank_*.json` of a run folder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Flight {
    /// Rank in the world.
    pub rank: usize,
    /// Ranks in the world.
    pub world_size: usize,
    /// Backend of the communicator.
    pub backend: String,
    /// Machine the rank runs on.
    pub node: String,
    /// Process id.
    pub process: u32,
    /// What it was doing.
    pub activity: Activity,
    /// Its groups, the world first.
    pub groups: Vec<GroupFlight>,
    /// What all ranks together came to; `None` before anything went wrong.
    pub verdict: Option<Verdict>,
    /// Its last operations, oldest first.
    pub records: Vec<Record>,
    /// When this was taken, in seconds on the clock of `records`; 0 where an older build has written it.
    #[serde(default)]
    pub clock: f64,
    /// The last time that its process did not run, where that is known.
    #[serde(default)]
    pub stall: Option<Stall>,
}

/// A time in which a process did not run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stall {
    /// How long, in seconds.
    pub seconds: f64,
    /// How long it has been over, in seconds.
    pub ago: f64,
}

impl Flight {
    /// What the rank would say `seconds` later if nothing happened until then.
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
