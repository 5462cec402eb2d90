//! The roles of a process, their sources, and the errors of finding them.

use std::fmt;

use super::vars::{JobSecret, Vars, is_name};

/// The source of this process's place, in the order in which sources are checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Flags of the command line.
    Flags,
    /// `RANK`, `LOCAL_RANK`, …, set by torchrun and `kiln launch`.
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

/// The address where the ranks meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Master {
    /// Host name or address, without brackets.
    pub host: String,
    /// Port. In a separate [`Node`], 0 leaves the choice to the launcher.
    pub port: u16,
    /// True if another program already listens on `port`, as under a torchrun that keeps its own store there.
    /// The ranks then meet at one of the ports above it.
    pub shared_port: bool,
}

/// The place of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankEnv {
    /// Source of the place.
    pub source: Source,
    /// This rank, from 0 up to `world_size - 1`.
    pub rank: usize,
    /// Number of ranks of the job.
    pub world_size: usize,
    /// This rank's number on its node.
    pub local_rank: usize,
    /// Number of ranks of this node.
    pub local_world_size: usize,
    /// Number of the node. MPI launchers do not provide it; the number is then a guess from the ranks. Group
    /// ranks by `node`.
    pub node_rank: usize,
    /// Name of the machine. Ranks with the same name share it.
    pub node: String,
    /// The address where the ranks meet.
    pub master: Master,
    /// Name of this start of the job, which ranks that meet have in common, in addition to the secret.
    pub meeting: String,
    /// The job.
    pub job: Job,
    /// Secret with which ranks authenticate each other. Without it they only meet on a loopback address,
    /// unless `comm.open` allows anyone to join.
    pub secret: Option<JobSecret>,
}

/// The place of a process that starts the ranks of its node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Source of the place.
    pub source: Source,
    /// This node, from 0 up to `nodes - 1`.
    pub node_rank: usize,
    /// Number of nodes of the job.
    pub nodes: usize,
    /// Number of ranks to start here, the same on every node.
    pub nproc_per_node: usize,
    /// Set if the number of GPUs determines the number of ranks; see [`Node::with_gpus`].
    pub per_gpu: Option<PerGpu>,
    /// The address where the ranks meet.
    pub master: Master,
    /// The job, as started by a scheduler or launcher.
    pub job: Job,
    /// Secret with which ranks authenticate each other.
    pub secret: Option<JobSecret>,
    /// Maximum number of restarts after failures.
    pub max_restarts: u64,
}

/// The role of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
    /// Train by itself, with ranks as threads, as the only process of this job.
    Alone(Job),
    /// Be one rank of a job.
    Rank(RankEnv),
    /// Start and supervise the ranks of a node.
    Node(Node),
}

/// A number of ranks that depends on the number of GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PerGpu {
    /// One rank per GPU; without a GPU there is nothing to start. Contains the flag or variable that requests
    /// it.
    Needed(&'static str),
    /// One rank per GPU; without a GPU, [`Node::nproc_per_node`] ranks.
    IfAny,
}

/// A source's result.
pub(super) enum Finding {
    /// The source has the answer, for the given reason.
    Taken(Role, String),
    /// The source does not apply, for the given reason.
    Skipped(String),
}

/// A job, as known to the scheduler or launcher that restarts it. A process that trains by itself has a job
/// if a scheduler started it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Job {
    /// Name of the job, which is the same for all of its processes and after a restart; `None` if it has none.
    pub name: Option<String>,
    /// Number of restarts, after a failure or from a queue.
    pub restarts: u64,
}

impl Job {
    /// Returns the scheduler's job. Its name is the same after a requeue, which no launcher inside the job
    /// can guarantee for its own names.
    pub(super) fn from_scheduler(vars: &Vars) -> Self {
        let named = |name| (vars.0)(name).filter(|name| is_name(name)).map(|name| name.trim().to_owned());
        Job {
            name: named("SLURM_JOB_ID").or_else(|| named("JOBSET_NAME")),
            restarts: vars.restarts("SLURM_RESTART_COUNT").max(vars.restarts("JOBSET_RESTART_ATTEMPT")),
        }
    }

    /// Returns this job for a launch that the user has named `id`: one job of a scheduler may contain several
    /// launches, and each continues its own run.
    pub(super) fn with_id(self, id: Option<String>) -> Self {
        let name = match (&self.name, id) {
            (Some(job), Some(id)) if *job == id || is_inside(job, &id) => Some(id),
            (Some(job), Some(id)) => Some(format!("{job}{INSIDE}{id}")),
            (None, id) => id,
            (Some(job), None) => Some(job.clone()),
        };
        Job { name, ..self }
    }

    /// Returns this job for a launcher that calls it `name` and has restarted it `restarts` times. The result
    /// is the same whether or not the launcher's count includes the scheduler's restarts. Other launchers'
    /// names are often random, and differ after a requeue; Kiln's launcher marks its name as part of the
    /// scheduler's.
    pub(super) fn launched(self, name: Option<&str>, restarts: u64) -> Self {
        let name = name.map(str::to_owned);
        let name = match &self.name {
            Some(job) => name.filter(|name| is_inside(job, name)).or(self.name),
            None => name,
        };
        Job { name, restarts: self.restarts.max(restarts) }
    }
}

/// Separator between the name of a scheduler's job and that of a launch inside it.
const INSIDE: char = '/';

/// Returns whether `name` is that of a launch inside the scheduler's job `job`.
fn is_inside(job: &str, name: &str) -> bool {
    name.strip_prefix(job).is_some_and(|rest| rest.starts_with(INSIDE))
}
