//! `[comm]`: how ranks talk to each other.

use std::time::Duration;

use kiln_collectives::tcp::{Ports, Seal};
use serde::{Deserialize, Serialize};

/// How ranks talk to each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CommBackend {
    /// `local` for ranks that are threads; for ranks that are processes `tcp`, or NCCL on GPUs.
    #[default]
    Auto,
    /// Ranks are threads of this process.
    Local,
    /// Every rank is a process that a launcher has started.
    Tcp,
    /// Every rank is a process that `mpirun` has started; in builds with feature `mpi`.
    Mpi,
}

section! {
    /// `[comm]`.
    CommSection {
        /// How ranks talk to each other.
        backend: CommBackend = CommBackend::Auto,
        /// Seconds to wait for the other ranks in one collective.
        timeout_s: f64 = 600.0,
        /// Seconds to wait at the start until all processes are there.
        join_timeout_s: f64 = 300.0,
        /// Ports on which processes listen for each other, as in `"29600-29700"`; any that the system gives
        /// if there is none here. Rank 0 listens on `MASTER_PORT` besides. NCCL and MPI choose ports of their
        /// own.
        ports: Option<Ports> = None,
        /// Whether processes may meet off the loopback address without `KILN_JOB_SECRET`: then whoever
        /// reaches the port can take a rank's place. For networks that only trusted machines reach.
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        open: bool = false,
        /// What protects the traffic between processes over TCP once they know each other: `off`, `mac`
        /// (changes are noticed) or `encrypt`. Needs `KILN_JOB_SECRET`. What ranks on one machine read from
        /// each other's memory stays there; NCCL's and MPI's traffic is not covered.
        #[serde(skip_serializing_if = "Seal::is_off")]
        seal: Seal = Seal::Off,
    }
}

impl CommSection {
    /// How long to wait for the other ranks in one collective.
    pub fn timeout(&self) -> Duration {
        Duration::try_from_secs_f64(self.timeout_s).unwrap_or(Duration::MAX)
    }

    /// How long to wait until all processes are there.
    pub fn join_timeout(&self) -> Duration {
        Duration::try_from_secs_f64(self.join_timeout_s).unwrap_or(Duration::MAX)
    }
}
