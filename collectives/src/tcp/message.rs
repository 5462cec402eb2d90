//! The messages between the ranks and the rendezvous.

use super::refused::Refused;
use crate::call::CallSite;
use crate::error::{Abort, Cause};
use crate::flight::Flight;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::time::Duration;

/// Number of a group, the same on all its ranks: 0 for the world; for other groups, derived from the split
/// that created them.
pub(super) type GroupNumber = u64;

/// A group's identity in messages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct GroupName {
    pub(super) number: GroupNumber,
    pub(super) name: String,
    /// World rank of each rank of the group.
    pub(super) ranks: Vec<usize>,
}

impl GroupName {
    /// Returns an abort caused by `rank`.
    pub(super) fn abort_by(&self, rank: usize, reason: String) -> Abort {
        let world_rank = self.ranks.get(rank).copied().unwrap_or(rank);
        Abort { group: self.name.as_str().into(), rank, world_rank, reason: reason.into() }
    }
}

/// A message from a rank to the rendezvous.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum ToRendezvous {
    /// The rank is alive.
    Beat,
    /// The rank aborts its world.
    Abort(Abort),
    /// The rank cannot continue with a call.
    Trouble(Trouble),
    /// The answer to a question.
    Report { request: u64, flight: Box<Flight> },
    /// The rank has finished without a failure.
    Goodbye,
    /// The rank is held for inspection, or released.
    Hold(bool),
    /// The rank received a stop request. Has an effect only until all ranks have arrived.
    Stop,
}

/// A rank's report of a call that cannot continue.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Trouble {
    pub(super) group: GroupName,
    pub(super) site: CallSite,
    pub(super) kind: TroubleKind,
}

/// The reason why a call cannot continue.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum TroubleKind {
    /// The call's wait has timed out.
    TimedOut { waited: Duration },
    /// Another rank of the group is in a different operation, or this rank passed invalid arguments.
    Mismatch,
    /// The connection to a rank of the group has ended. `left` is true if the peer announced that.
    Lost { peer: usize, left: bool, reason: String },
}

/// A message from the rendezvous to a rank.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum ToRank {
    /// The rendezvous is alive.
    Beat,
    /// All ranks have arrived.
    Joined { session: u64, ranks: Vec<RankInfo> },
    /// Time ran out before all ranks had arrived; `refused` lists some refused callers that claimed to be a
    /// missing rank.
    Incomplete { missing: Vec<usize>, refused: Vec<Refused> },
    /// Asks what the rank is doing. `at` is an operation that the rank should have issued by now; a rank that
    /// has not issued it waits briefly before it answers.
    Collect { request: u64, at: Option<(GroupName, u64)> },
    /// A rank is held for inspection, or released.
    Held { rank: usize, is_held: bool },
    /// A group has failed, or the world if `group` is `None`.
    Failed { group: Option<GroupNumber>, cause: Cause },
    /// The ranks no longer wait for missing ones.
    CalledOff(CalledOff),
}

/// The reason why the ranks no longer wait for missing ones.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum CalledOff {
    /// Rank `by` received a stop request.
    Stopped { by: usize },
    /// A rank of this job has settings that differ from those of the other ranks.
    Refused(Refused),
}

/// The address of a rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct RankInfo {
    /// Address on which the rank listens for other ranks.
    pub(super) address: SocketAddr,
    /// Machine that the rank runs on.
    pub(super) node: String,
}
