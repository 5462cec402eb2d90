//! Callers that claimed to be a rank and were refused.

use super::options::Seal;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::IpAddr;

/// A caller that was refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Refused {
    /// The rank that the caller claims to be. Proven, unless the caller does not know the secret.
    pub(super) rank: usize,
    /// The caller's address.
    pub(super) from: IpAddr,
    /// Reason for the refusal.
    pub(super) why: Why,
}

/// The reason why a caller was refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Why {
    /// The caller does not know the secret, so it may be anyone.
    Secret,
    /// The caller belongs to another job. Contains a sentence for the message.
    Job(String),
    /// The caller belongs to this job, but its settings differ from those of the other ranks. Contains a
    /// sentence for the message.
    Settings(String),
}

impl Refused {
    /// Returns whether the caller has proved to be the rank that it claims to be.
    pub(super) fn is_proven(&self) -> bool {
        self.why != Why::Secret
    }
}

impl Why {
    /// Describes a caller of another job. Takes two ranks and the names of their jobs, the refusing rank
    /// first.
    pub(super) fn other_job([(own, ours), (rank, theirs)]: [(usize, &str); 2]) -> Why {
        Why::Job(format!(
            "rank {own} is of the job \"{ours}\", and rank {rank} of \"{theirs}\"; give each job its \
             own port (MASTER_PORT), or all processes of one job the same name (--rdzv-id)"
        ))
    }

    /// Describes a caller with a different seal. Takes two ranks and their seals, the refusing rank first.
    pub(super) fn other_seal([(own, ours), (rank, theirs)]: [(usize, Seal); 2]) -> Why {
        Why::Settings(format!(
            "rank {own} has comm.seal = \"{ours}\", and rank {rank} has \"{theirs}\"; give all processes the \
             same"
        ))
    }

    /// Describes a caller with a different world size. Takes two ranks and the numbers of ranks that they
    /// expect, the refusing rank first.
    pub(super) fn other_world([(own, ours), (rank, theirs)]: [(usize, usize); 2]) -> Why {
        Why::Settings(format!(
            "rank {own} expects {ours} ranks, and rank {rank} expects {theirs}; give all processes the same \
             number of ranks and of nodes"
        ))
    }

    /// Returns the reason as a sentence, for messages and for the caller.
    pub(super) fn reason(&self) -> &str {
        match self {
            Why::Secret => "it does not know this job's secret: give all processes the same KILN_JOB_SECRET",
            Why::Job(reason) | Why::Settings(reason) => reason,
        }
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Refused { rank, from, why } = self;
        let reason = why.reason();
        match self.is_proven() {
            true => write!(f, "rank {rank} at {from} was refused: {reason}"),
            false => write!(f, "a caller at {from} claimed to be rank {rank} and was refused: {reason}"),
        }
    }
}
