//! What a process can be among others, and who said so.

use std::fmt;

use super::job::Job;
use super::vars::JobSecret;

/// Who told this process its place, in the order in which they are asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Flags of the command line.
    Flags,
    /// `RANK`, `LOCAL_RANK`, …, which torchrun and `kiln launch` set.
    Torchrun,
    /// `PET_*`: torchrun's arguments as variables.
    Pet,
    /// A task of `srun`.
    Slurm,
    /// `mpirun` of Open MPI.
    OpenMpi,
    /// `mpiexec` of MPICH and its relatives, or PMIx.
    Pmi,
    /// A pod of a Kubernetes JobSet or indexed Job.
    JobSet,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Source::Flags => "flags",
            Source::Torchrun => "torchrun",
            Source::Pet => "PET_*",
            Source::Slurm => "Slurm",
            Source::OpenMpi => "Open MPI",
            Source::Pmi => "PMI",
            Source::JobSet => "JobSet",
        })
    }
}

/// Where the ranks meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Master {
    /// Host name or address, without brackets.
    pub host: String,
    /// Port. In a [`Node`] of its own, 0 leaves the choice to the launcher.
    pub port: u16,
    /// Whether somebody else listens on `port` already, which is so under a torchrun that keeps its
    /// own store there. The ranks then meet at one of the ports above it.
    pub shared_port: bool,
}

/// The place of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankEnv {
    /// Who told.
    pub source: Source,
    /// This rank, from 0 up to `world_size - 1`.
    pub rank: usize,
    /// Ranks of the job.
    pub world_size: usize,
    /// This rank among those of its node.
    pub local_rank: usize,
    /// Ranks of this node.
    pub local_world_size: usize,
    /// The node. MPI launchers do not tell; the number is then a guess from the ranks. Group ranks by `node`.
    pub node_rank: usize,
    /// Names the machine: ranks with the same name share it.
    pub node: String,
    /// Where the ranks meet.
    pub master: Master,
    /// Names this start of the job: what ranks that meet have in common, besides the secret.
    pub meeting: String,
    /// The job.
    pub job: Job,
    /// What ranks authenticate each other with. Without it they meet on a loopback address only, unless
    /// `comm.open` says that everyone may join.
    pub secret: Option<JobSecret>,
}

/// The place of a process that starts the ranks of its node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Who told.
    pub source: Source,
    /// This node, from 0 up to `nodes - 1`.
    pub node_rank: usize,
    /// Nodes of the job.
    pub nodes: usize,
    /// Ranks to start here; every node starts as many.
    pub nproc_per_node: usize,
    /// Whether the number of GPUs decides that; see [`Node::with_gpus`].
    pub per_gpu: Option<PerGpu>,
    /// Where the ranks meet.
    pub master: Master,
    /// The job, as others have started it.
    pub job: Job,
    /// What ranks authenticate each other with.
    pub secret: Option<JobSecret>,
    /// How often to start the ranks again after a failure.
    pub max_restarts: u64,
}

/// What this process is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
    /// Train by itself, with ranks as threads, as the only process of this job.
    Alone(Job),
    /// Be one rank of a job.
    Rank(RankEnv),
    /// Start the ranks of a node and watch over them.
    Node(Node),
}

/// Ranks that follow the number of GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PerGpu {
    /// One for each; without one there is nothing to start. This flag or variable says so.
    Needed(&'static str),
    /// One for each; without one, as many as [`Node::nproc_per_node`] says.
    IfAny,
}

/// What a source makes of its variables.
pub(super) enum Finding {
    /// This is the answer, and why.
    Taken(Role, String),
    /// Not this source, and why.
    Passed(String),
}
