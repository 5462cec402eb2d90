//! The errors of collectives, and the causes of a group's failure.

use crate::call::{ArgumentError, Call, CallSite, list_calls};
use crate::label::text;
use crate::verdict::Verdict;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;

/// The reason why a collective failed. Rank numbers count within the group named next to them. Operations are numbered
/// from 0 in their group, equally on every rank.
#[derive(Clone, Debug, PartialEq, thiserror::Error, Serialize, Deserialize)]
pub enum CommError {
    /// This rank's arguments are invalid. Other ranks with valid arguments get [`CommError::Mismatch`].
    #[error("{site} on rank {}: {problem}; correct the arguments of this call", .site.rank)]
    Invalid {
        /// The call with the invalid arguments.
        site: CallSite,
        /// The error in the arguments.
        #[source]
        problem: ArgumentError,
    },
    /// The ranks issued different operations. The group has failed.
    #[error(
        "operation {sequence} of group \"{group}\" differs between ranks: {}; \
         make every rank issue the same operations in the same order",
        list_calls(.calls.iter().enumerate().filter_map(|(rank, call)| Some((rank, call.as_ref()?))))
    )]
    Mismatch {
        /// Group of the call.
        #[serde(with = "text")]
        group: Arc<str>,
        /// Number of the operation in the group.
        sequence: u64,
        /// The call of each rank; `None` for a rank that had not called yet.
        calls: Vec<Option<Call>>,
    },
    /// An operation did not complete in time. Later operations of the group return this error too, on every rank.
    #[error("{site} timed out on rank {} after {waited:?}: {verdict}", .site.rank)]
    TimedOut {
        /// The call whose wait timed out first.
        site: CallSite,
        /// The limit that the waiting rank passed to `wait`.
        waited: Duration,
        /// Ranks that had not called the operation when the wait timed out.
        missing: Vec<usize>,
        /// The verdict from the flight recorders of all ranks, with world ranks.
        verdict: Box<Verdict>,
    },
    /// A rank gave up, left the group or died.
    #[error(
        "{site} was aborted by rank {} of group \"{}\" (world rank {}): {}; look at that rank first",
        .by.rank, .by.group, .by.world_rank, .by.reason
    )]
    Aborted {
        /// The call that failed.
        site: CallSite,
        /// The rank that caused it.
        by: Abort,
    },
}

/// The rank that ended a group, and the reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Abort {
    /// Group in which the abort began.
    #[serde(with = "text")]
    pub group: Arc<str>,
    /// Rank in that group.
    pub rank: usize,
    /// The same rank's number in the world.
    pub world_rank: usize,
    /// The rank's reason.
    #[serde(with = "text")]
    pub reason: Arc<str>,
}

/// The cause of a group's failure, from which every affected operation makes its own error.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Cause {
    /// A rank gave up, left the group or died.
    Abort(Abort),
    /// A mismatch or a time-out.
    Error(CommError),
}

impl Cause {
    /// Returns the error of the call at `site`. `problem` is the error in that call's own arguments.
    pub fn error(&self, site: &CallSite, problem: Option<ArgumentError>) -> CommError {
        match (self, problem) {
            // The mismatch that the other ranks found is this call's own error.
            (Cause::Error(CommError::Mismatch { sequence, .. }), Some(problem))
                if *sequence == site.sequence =>
            {
                CommError::Invalid { site: site.clone(), problem }
            }
            (Cause::Error(error), _) => error.clone(),
            (Cause::Abort(by), _) => CommError::Aborted { site: site.clone(), by: by.clone() },
        }
    }
}
