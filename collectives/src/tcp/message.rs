//! The messages of the ranks and the rendezvous to each other.

use super::refused::Refused;
use crate::call::CallSite;
use crate::error::{Abort, Cause};
use crate::flight::Flight;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::time::Duration;

/// Number of a group, the same on all its ranks: the world is 0, others follow from the split that made them.
pub(super) type GroupNumber = u64;

/// A group as messages name it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct GroupName {
    pub(super) number: GroupNumber,
    pub(super) name: String,
    /// World ranks of its ranks.
    pub(super) ranks: Vec<usize>,
}

impl GroupName {
    /// An abort caused by `rank`.
    pub(super) fn abort_by(&self, rank: usize, reason: String) -> Abort {
        let world_rank = self.ranks.get(rank).copied().unwrap_or(rank);
        Abort { group: self.name.as_str().into(), rank, world_rank, reason: reason.into() }
    }
}

/// What a rank tells the rendezvous.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum ToRendezvous {
    /// I am alive.
    Beat,
    /// I abort.
    Abort(Abort),
    /// I cannot go on with a call.
    Trouble(Trouble),
    /// The answer to a question.
    Report { request: u64, flight: Box<Flight> },
    /// I am done; nothing is wrong.
    Goodbye,
    /// Somebody holds me to look into me, or no longer.
    Hold(bool),
    /// I was asked to stop. Only has an effect until all ranks have come.
    Stop,
}

/// A call that cannot go on, as its rank reports it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Trouble {
    pub(super) group: GroupName,
    pub(super) site: CallSite,
    pub(super) kind: TroubleKind,
}

/// Why a call cannot go on.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum TroubleKind {
    /// Its wait has timed out.
    TimedOut { waited: Duration },
    /// Another rank of the group is in another operation, or this one has wrong arguments.
    Mismatch,
    /// The connection to a rank of the group has ended. `left` says that this rank announced it.
    Lost { peer: usize, left: bool, reason: String },
}

/// What the rendezvous tells a rank.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum ToRank {
    /// I am alive.
    Beat,
    /// All ranks have come.
    Joined { session: u64, ranks: Vec<RankInfo> },
    /// Time ran out before all ranks had come; `refused` are some callers that were refused in the place of
    /// one that is missing.
    Incomplete { missing: Vec<usize>, refused: Vec<Refused> },
    /// What are you doing? `at` is an operation that this rank should have issued by now; if it
    /// has not, it waits a moment before it answers.
    Collect { request: u64, at: Option<(GroupName, u64)> },
    /// Somebody holds a rank to look into it, or no longer.
    Held { rank: usize, is_held: bool },
    /// A group, or with `None` the world, has failed.
    Failed { group: Option<GroupNumber>, cause: Cause },
    /// Nobody waits for missing ranks any longer.
    CalledOff(CalledOff),
}

/// Why nobody waits for missing ranks any longer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum CalledOff {
    /// Rank `by` was asked to stop.
    Stopped { by: usize },
    /// A rank of this job has settings that do not fit those of the others.
    Refused(Refused),
}

/// How to reach a rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct RankInfo {
    /// Where it listens for other ranks.
    pub(super) address: SocketAddr,
    /// Machine it runs on.
    pub(super) node: String,
}
