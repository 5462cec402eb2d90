//! Who came in the place of a rank and was refused.

use super::options::Seal;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::IpAddr;

/// A caller that is not let in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Refused {
    /// The rank that it says it is. Proven unless it does not know the secret.
    pub(super) rank: usize,
    /// Where it calls from.
    pub(super) from: IpAddr,
    /// What is wrong with it.
    pub(super) why: Why,
}

/// What is wrong with a caller.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Why {
    /// It does not know the secret, so it may be anyone.
    Secret,
    /// It is of another job; in words.
    Job(String),
    /// It is of this job, and was started with settings that do not go with those of the others; in words.
    Settings(String),
}

impl Refused {
    /// Whether it has proved to be the rank that it says it is.
    pub(super) fn is_proven(&self) -> bool {
        self.why != Why::Secret
    }
}

impl Why {
    /// Two ranks and the jobs that they are of, first the one that refuses.
    pub(super) fn other_job([(own, ours), (rank, theirs)]: [(usize, &str); 2]) -> Why {
        Why::Job(format!(
            "rank {own} is of the job \"{ours}\", and rank {rank} of \"{theirs}\"; give each job a port of its \
             own (MASTER_PORT), or all processes of one the same name (--rdzv-id)"
        ))
    }

    /// Two ranks and their seals.
    pub(super) fn other_seal([(own, ours), (rank, theirs)]: [(usize, Seal); 2]) -> Why {
        Why::Settings(format!(
            "rank {own} has comm.seal = \"{ours}\", and rank {rank} has \"{theirs}\"; give all processes the \
             same"
        ))
    }

    /// Two ranks and how many ranks they expect.
    pub(super) fn other_world([(own, ours), (rank, theirs)]: [(usize, usize); 2]) -> Why {
        Why::Settings(format!(
            "rank {own} expects {ours} ranks, and rank {rank} expects {theirs}; give all processes the same \
             number of ranks and of nodes"
        ))
    }

    /// In words, for the caller as well.
    pub(super) fn reason(&self) -> &str {
        match self {
            Why::Secret => {
                "it does not know this job's secret: give all processes the same KILN_JOB_SECRET"
            }
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
