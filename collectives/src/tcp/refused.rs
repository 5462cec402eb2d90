//! Callers that claimed to be a rank and were refused.

use super::options::Seal;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::IpAddr;

/// A caller that was refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Refused {
    /// The rank that it claims to be. Proven unless the caller does not know the secret.
    pub(super) rank: usize,
    /// The address that it calls from.
    pub(super) from: IpAddr,
    /// Why it was refused.
    pub(super) why: Why,
}

/// Why a caller was refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Why {
    /// It does not know the secret, so it may be anyone.
    Secret,
    /// It is of another job. Holds a sentence for people.
    Job(String),
    /// It is of this job, and its settings do not fit those of the others. Holds a sentence for people.
    Settings(String),
}

impl Refused {
    /// Whether it has proved to be the rank that it claims to be.
    pub(super) fn is_proven(&self) -> bool {
        self.why != Why::Secret
    }
}

impl Why {
    /// Takes two ranks and their jobs, first those of the rank that refuses.
    pub(super) fn other_job([(own, ours), (rank, theirs)]: [(usize, &str); 2]) -> Why {
        Why::Job(format!(
            "rank {own} is of the job \"{ours}\", and rank {rank} of \"{theirs}\"; give each job a port \
             of its own (MASTER_PORT), or all processes of one the same name (--rdzv-id)"
        ))
    }

    /// Takes two ranks and their seals, first those of the rank that refuses.
    pub(super) fn other_seal([(own, ours), (rank, theirs)]: [(usize, Seal); 2]) -> Why {
        Why::Settings(format!(
            "rank {own} has comm.seal = \"{ours}\", and rank {rank} has \"{theirs}\"; give all processes the \
             same"
        ))
    }

    /// Takes two ranks and the numbers of ranks that they expect, first those of the rank that refuses.
    pub(super) fn other_world([(own, ours), (rank, theirs)]: [(usize, usize); 2]) -> Why {
        Why::Settings(format!(
            "rank {own} expects {ours} ranks, and rank {rank} expects {theirs}; give all processes the same \
             number of ranks and of nodes"
        ))
    }

    /// A sentence for people, also for the caller.
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
            true => write!(f, "rank {rank} at {from} came and was refused: {reason}"),
            false => write!(f, "somebody at {from} came as rank {rank} and was refused: {reason}"),
        }
    }
}
