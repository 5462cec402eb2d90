use super::options::Seal;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::IpAddr;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Refused {
    pub(super) rank: usize,
    pub(super) from: IpAddr,
    pub(super) why: Why,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Why {
    Secret,
    /// The caller belongs to another job. Contains a sentence for messages.
    Job(String),
    /// The caller's settings differ from those of its job. Contains a sentence for messages.
    Settings(String),
}

impl Refused {
    pub(super) fn is_proven(&self) -> bool {
        self.why != Why::Secret
    }
}

impl Why {
    pub(super) fn other_job([(own, ours), (rank, theirs)]: [(usize, &str); 2]) -> Why {
        Why::Job(format!(
            "rank {own} is of the job \"{ours}\", and rank {rank} of \"{theirs}\"; give each job its \
             own port (MASTER_PORT), or all processes of one job the same name (--rdzv-id)"
        ))
    }

    pub(super) fn other_seal([(own, ours), (rank, theirs)]: [(usize, Seal); 2]) -> Why {
        Why::Settings(format!(
            "rank {own} has comm.seal = \"{ours}\", and rank {rank} has \"{theirs}\"; give all processes the \
             same"
        ))
    }

    pub(super) fn other_world([(own, ours), (rank, theirs)]: [(usize, usize); 2]) -> Why {
        Why::Settings(format!(
            "rank {own} expects {ours} ranks, and rank {rank} expects {theirs}; give all processes the same \
             number of ranks and of nodes"
        ))
    }

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
