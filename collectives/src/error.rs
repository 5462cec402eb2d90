//! The errors of collectives, and why a group fails.

use crate::call::{ArgumentError, Call, CallSite, list_calls};
use crate::label::text;
use crate::verdict::Verdict;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;

/// Why a collective failed.
///
/// Ranks are ranks of the group named next to them. Operations are numbered from 0 in their group, so an
/// operation has the same number on every rank.
#[derive(Clone, Debug, PartialEq, thiserror::Error, Serialize, Deserialize)]
pub enum CommError {
    /// This rank passed arguments that cannot work. The other ranks get [`CommError::Mismatch`] for the same
    /// operation, unless their own arguments are wrong too.
    #[error("{site} on rank {}: {problem}; correct the arguments of this call", .site.rank)]
    Invalid {
        /// The call.
        site: CallSite,
        /// What is wrong with the arguments.
        #[source]
        problem: ArgumentError,
    },
    /// The ranks issued different operations. The group is failed from here on.
    #[error(
        "operation {sequence} of group \"{group}\" differs between ranks: {}; \
         make every rank issue the same operations in the same order",
        list_calls(.calls.iter().enumerate().filter_map(|(rank, call)| Some((rank, call.as_ref()?))))
    )]
    Mismatch {
        /// Group it was called on.
        #[serde(with = "text")]
        group: Arc<str>,
        /// Number of the operation in the group.
        sequence: u64,
        /// The call of each rank, by rank; `None` for a rank that had not called yet when the others were
        /// found to differ.
        calls: Vec<Option<Call>>,
    },
    /// An operation did not complete in time. Later operations of the group return this error too, on every
    /// rank.
    #[error("{site} timed out on rank {} after {waited:?}: {verdict}", .site.rank)]
    TimedOut {
        /// The call whose wait ran out first.
        site: CallSite,
        /// The limit that its rank passed to wait.
        waited: Duration,
        /// Ranks that had not called the operation by then. If it is empty, the verdict says whether some
        /// ranks were late or the transfer was too slow.
        missing: Vec<usize>,
        /// What the flight recorders of all ranks show, in world ranks.
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
        /// Who caused it.
        by: Abort,
    },
}

/// The rank that ended a group, and its reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Abort {
    /// Group the abort came from.
    #[serde(with = "text")]
    pub group: Arc<str>,
    /// Rank in that group.
    pub rank: usize,
    /// The same rank counted in the world that all groups were split from.
    pub world_rank: usize,
    /// Its reason.
    #[serde(with = "text")]
    pub reason: Arc<str>,
}

/// Why a group has failed. Every operation that it hits turns it into an error.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Cause {
    Abort(Abort),
    /// A mismatch or a time-out.
    Error(CommError),
}

impl Cause {
    /// The error of the call at `site`. `problem` is what is wrong with that call's own arguments.
    pub(crate) fn error(&self, site: &CallSite, problem: Option<ArgumentError>) -> CommError {
        match (self, problem) {
            // The other ranks have found this very call to differ from theirs.
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
