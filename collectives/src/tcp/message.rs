//! Messages between the ranks and the rendezvous.

use super::refused::Refused;
use crate::call::CallSite;
use crate::error::{Abort, Cause};
use crate::flight::Flight;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::time::Duration;

/// 0 for the world; for other groups, derived from the split that created them. Equal on all ranks.
pub(super) type GroupNumber = u64;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct GroupName {
    pub(super) number: GroupNumber,
    pub(super) name: String,
    pub(super) ranks: Vec<usize>,
}

impl GroupName {
    pub(super) fn abort_by(&self, rank: usize, reason: String) -> Abort {
        let world_rank = self.ranks.get(rank).copied().unwrap_or(rank);
        Abort { group: self.name.as_str().into(), rank, world_rank, reason: reason.into() }
    }
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum ToRendezvous {
    Beat,
    Abort(Abort),
    Trouble(Trouble),
    Report { request: u64, flight: Box<Flight> },
    Goodbye,
    Hold(bool),
    Stop,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Trouble {
    pub(super) group: GroupName,
    pub(super) site: CallSite,
    pub(super) kind: TroubleKind,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum TroubleKind {
    TimedOut { waited: Duration },
    Mismatch,
    Lost { peer: usize, left: bool, reason: String },
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum ToRank {
    /// The rendezvous is alive.
    Beat,
    /// All ranks have arrived.
    Joined { session: u64, ranks: Vec<RankInfo> },
    /// Time ran out before all ranks had arrived. `refused`: callers that claimed to be missing ranks.
    Incomplete { missing: Vec<usize>, refused: Vec<Refused> },
    /// Asks what the rank is doing. A rank that has not issued the operation `at` yet waits briefly before it answers.
    Collect { request: u64, at: Option<(GroupName, u64)> },
    /// A rank is held for inspection, or released.
    Held { rank: usize, is_held: bool },
    /// A group has failed, or the world if `group` is `None`.
    Failed { group: Option<GroupNumber>, cause: Cause },
    /// The ranks no longer wait for missing ones.
    CalledOff(CalledOff),
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum CalledOff {
    Stopped { by: usize },
    Refused(Refused),
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct RankInfo {
    pub(super) address: SocketAddr,
    pub(super) node: String,
}
