//! The errors of collectives.

use crate::call::{ArgumentError, Call, CallSite, known, list_calls};
use crate::label::Label;
use crate::operation::Operation;
use crate::verdict::Verdict;
use std::sync::Arc;
use std::time::Duration;

/// Why a collective failed.
///
/// Ranks are ranks of the group named next to them. `sequence` counts the operations of that
/// group from 0, so it is the same number on every rank.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CommError {
    /// This rank passed arguments that cannot work. The other ranks get [`CommError::Mismatch`]
    /// for the same operation, unless their own arguments are wrong too.
    #[error(
        "{operation} {sequence} of group \"{group}\" for {label} on rank {rank}: {problem}; \
         correct the arguments of this call"
    )]
    Invalid {
        /// Operation called.
        operation: Operation,
        /// Number of the operation in the group.
        sequence: u64,
        /// What the operation was for.
        label: Label,
        /// Group it was called on.
        group: Arc<str>,
        /// Rank that called it: the one that returns this error.
        rank: usize,
        /// What is wrong with the arguments.
        #[source]
        problem: ArgumentError,
    },
    /// The ranks issued different operations. The group is failed from here on.
    #[error(
        "operation {sequence} of group \"{group}\" differs between ranks: {}; \
         make every rank issue the same operations in the same order",
        list_calls(known(.calls))
    )]
    Mismatch {
        /// Group it was called on.
        group: Arc<str>,
        /// Number of the operation in the group.
        sequence: u64,
        /// The call of each rank, by rank; `None` for a rank that had not called yet when the others were
        /// found to differ.
        calls: Vec<Option<Call>>,
    },
    /// An operation did not complete in time. Later operations of the group return this error
    /// too, on every rank.
    #[error(
        "{operation} {sequence} of group \"{group}\" for {label} timed out on rank {rank} \
         after {waited:?}: {verdict}"
    )]
    TimedOut {
        /// Operation waited for.
        operation: Operation,
        /// Number of the operation in the group.
        sequence: u64,
        /// What the operation was for.
        label: Label,
        /// Group it was called on.
        group: Arc<str>,
        /// Rank whose wait ran out first.
        rank: usize,
        /// The limit that this rank passed to wait.
        waited: Duration,
        /// Ranks that had not called the operation by then. If it is empty, the verdict says whether some
        /// ranks were late or the transfer was too slow.
        missing: Vec<usize>,
        /// What the flight recorders of all ranks show, in world ranks.
        verdict: Box<Verdict>,
    },
    /// A rank gave up, left the group or died.
    #[error(
        "{operation} {sequence} of group \"{group}\" for {label} was aborted by rank {rank} of \
         group \"{origin}\" (world rank {world_rank}): {reason}; look at that rank first"
    )]
    Aborted {
        /// Operation that failed.
        operation: Operation,
        /// Number of the operation in the group.
        sequence: u64,
        /// What the operation was for.
        label: Label,
        /// Group it was called on.
        group: Arc<str>,
        /// Rank that caused the abort, counted in `origin`.
        rank: usize,
        /// The same rank counted in the world all groups were split from.
        world_rank: usize,
        /// Group the abort came from.
        origin: Arc<str>,
        /// The reason that this rank gave.
        reason: Arc<str>,
    },
}

impl CommError {
    pub(crate) fn invalid(site: &CallSite, problem: ArgumentError) -> CommError {
        CommError::Invalid {
            operation: site.operation,
            sequence: site.sequence,
            label: site.label.clone(),
            group: Arc::clone(&site.group),
            rank: site.rank,
            problem,
        }
    }
}

/// The rank that ended a group, and its reason. Every operation that it hits turns it into an error.
#[derive(Clone, Debug)]
pub(crate) struct Abort {
    pub(crate) origin: Arc<str>,
    pub(crate) rank: usize,
    pub(crate) world_rank: usize,
    pub(crate) reason: Arc<str>,
}

impl Abort {
    pub(crate) fn error(&self, site: &CallSite) -> CommError {
        CommError::Aborted {
            operation: site.operation,
            sequence: site.sequence,
            label: site.label.clone(),
            group: Arc::clone(&site.group),
            rank: self.rank,
            world_rank: self.world_rank,
            origin: Arc::clone(&self.origin),
            reason: Arc::clone(&self.reason),
        }
    }
}
