//! The messages of the ranks and the rendezvous to each other.

use super::refused::Refused;
use crate::call::{Call, CallSite};
use crate::error::{Abort, CommError};
use crate::flight::Flight;
use crate::label::Label;
use crate::operation::Operation;
use crate::verdict::Verdict;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// Number of a group, the same on all its members: the world is 0, others follow from the split
/// that made them.
pub(super) type GroupNumber = u64;

/// A group as messages name it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct GroupName {
    pub(super) number: GroupNumber,
    pub(super) name: String,
    /// World ranks of the members.
    pub(super) ranks: Vec<usize>,
}

/// One operation of a group, seen from one of its ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Site {
    pub(super) group: GroupName,
    /// Rank in the group.
    pub(super) rank: usize,
    pub(super) sequence: u64,
    pub(super) operation: Operation,
    pub(super) label: Label,
}

/// What a rank tells the rendezvous.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum ToRendezvous {
    /// I am alive.
    Beat,
    /// I cannot go on.
    Trouble(Trouble),
    /// The answer to a question.
    Report { request: u64, flight: Box<Flight> },
    /// I am done; nothing is wrong.
    Goodbye,
    /// I was asked to stop. Only has an effect until all ranks have come.
    Stop,
}

/// Why a rank cannot go on, as it reports it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Trouble {
    /// The rank aborts.
    Abort { group: GroupName, rank: usize, reason: String },
    /// A wait has timed out.
    TimedOut { site: Site, waited: Duration },
    /// Another rank of the group is in another operation, or this one has wrong arguments.
    Mismatch { site: Site },
    /// The connection to a rank of the group has ended. `left` says that this rank announced it.
    Lost { site: Site, peer: usize, left: bool, reason: String },
}

/// What the rendezvous tells a rank.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum ToRank {
    /// I am alive.
    Beat,
    /// All ranks have come.
    Joined { session: u64, members: Vec<MemberInfo> },
    /// Time ran out before all ranks had come; `refused` are some callers that were refused in the place of
    /// one that is missing.
    Incomplete { missing: Vec<usize>, refused: Vec<Refused> },
    /// What are you doing? `at` is an operation that this rank should have issued by now; if it
    /// has not, it waits a moment before it answers.
    Collect { request: u64, at: Option<(GroupName, u64)> },
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
pub(super) struct MemberInfo {
    /// Where it listens for other ranks.
    pub(super) address: SocketAddr,
    /// Machine it runs on.
    pub(super) node: String,
}

/// Why a group or the world has failed. Every operation that it hits turns it into an error.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Cause {
    Abort { origin: String, rank: usize, world_rank: usize, reason: String },
    Mismatch { group: String, sequence: u64, calls: Vec<Option<Call>> },
    TimedOut { site: Site, waited: Duration, missing: Vec<usize>, verdict: Verdict },
}

impl Cause {
    pub(super) fn error(&self, at: &CallSite) -> CommError {
        match self {
            Cause::Abort { origin, rank, world_rank, reason } => Abort {
                origin: Arc::from(origin.as_str()),
                rank: *rank,
                world_rank: *world_rank,
                reason: Arc::from(reason.as_str()),
            }
            .error(at),
            Cause::Mismatch { group, sequence, calls } => CommError::Mismatch {
                group: Arc::from(group.as_str()),
                sequence: *sequence,
                calls: calls.clone(),
            },
            Cause::TimedOut { site, waited, missing, verdict } => CommError::TimedOut {
                operation: site.operation,
                sequence: site.sequence,
                label: site.label.clone(),
                group: Arc::from(site.group.name.as_str()),
                rank: site.rank,
                waited: *waited,
                missing: missing.clone(),
                verdict: Box::new(verdict.clone()),
            },
        }
    }

    pub(super) fn verdict(&self) -> Option<&Verdict> {
        match self {
            Cause::TimedOut { verdict, .. } => Some(verdict),
            _ => None,
        }
    }
}
