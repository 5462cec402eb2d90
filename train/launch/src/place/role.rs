use std::fmt;

use super::vars::{JobSecret, Vars, is_name};

/// The source of this process's place, in the order in which sources are checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Command-line flags.
    Flags,
    /// `RANK`, `LOCAL_RANK`, …, set by `kiln launch`.
    Launch,
    /// The same variables, set by torchrun.
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
            Source::Launch => "kiln launch",
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
    /// Port. For a [`Node`], 0 lets the launcher choose.
    pub port: u16,
    /// True if another program, such as torchrun, listens on `port`. The ranks then use one of the next 16 ports.
    pub shared_port: bool,
}

/// The place of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankEnv {
    /// The source of the place.
    pub source: Source,
    /// Number of this rank, below `world_size`.
    pub rank: usize,
    /// Number of ranks of the job.
    pub world_size: usize,
    /// This rank's number on its node.
    pub local_rank: usize,
    /// Number of ranks on this node.
    pub local_world_size: usize,
    /// Number of the node, guessed from the ranks under MPI launchers. To group ranks by machine, use `node`.
    pub node_rank: usize,
    /// Name of the machine, equal for ranks that share a machine.
    pub node: String,
    /// The address where the ranks meet.
    pub master: Master,
    /// Name of this start of the job, equal on all ranks that meet. Used in addition to the secret.
    pub meeting: String,
    /// The job.
    pub job: Job,
    /// Secret of the job. Without one, ranks meet only on a loopback address, unless `comm.open` is set.
    pub secret: Option<JobSecret>,
}

/// The place of a process that starts the ranks of its node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// The source of the place.
    pub source: Source,
    /// Number of this node, below `nodes`.
    pub node_rank: usize,
    /// Number of nodes of the job.
    pub nodes: usize,
    /// Number of ranks to start here, equal on every node.
    pub nproc_per_node: usize,
    /// Set if the number of ranks depends on the number of GPUs; see [`Node::with_gpus`].
    pub per_gpu: Option<PerGpu>,
    /// The address where the ranks meet.
    pub master: Master,
    /// The job, as identified by the scheduler or launcher that started it.
    pub job: Job,
    /// Secret of the job.
    pub secret: Option<JobSecret>,
    /// Maximum number of restarts after failures.
    pub max_restarts: u64,
}

/// The role of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
    /// The only process of the job, with ranks as threads.
    Alone(Job),
    /// One rank of a job.
    Rank(RankEnv),
    /// The launcher of a node's ranks.
    Node(Node),
}

/// A number of ranks that depends on the number of GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PerGpu {
    /// One rank per GPU; fails without a GPU. Holds the flag or variable that requests this.
    Needed(&'static str),
    /// One rank per GPU; without a GPU, [`Node::nproc_per_node`] ranks.
    IfAny,
}

pub(super) enum Finding {
    Taken(Role, String),
    Skipped(String),
}

/// A job, as identified by the scheduler or launcher that restarts it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Job {
    /// Name of the job, equal for all processes and after a restart, if any.
    pub name: Option<String>,
    /// Number of restarts, after failures or by requeueing.
    pub restarts: u64,
}

impl Job {
    /// Returns the scheduler's job. Its name stays the same after a requeue, unlike names of launchers inside the job.
    pub(super) fn from_scheduler(vars: &Vars) -> Self {
        let named = |name| (vars.0)(name).filter(|name| is_name(name)).map(|name| name.trim().to_owned());
        Job {
            name: named("SLURM_JOB_ID").or_else(|| named("JOBSET_NAME")),
            restarts: vars.restarts("SLURM_RESTART_COUNT").max(vars.restarts("JOBSET_RESTART_ATTEMPT")),
        }
    }

    /// Returns this job for a launch that the user named `id`. Launches in one scheduler's job continue separate runs.
    pub(super) fn with_id(self, id: Option<String>) -> Self {
        let name = match (&self.name, id) {
            (Some(job), Some(id)) if *job == id || is_inside(job, &id) => Some(id),
            (Some(job), Some(id)) => Some(format!("{job}{INSIDE}{id}")),
            (None, id) => id,
            (Some(job), None) => Some(job.clone()),
        };
        Job { name, ..self }
    }

    /// Returns this job for a launcher that calls it `name` and has restarted it `restarts` times. The launcher's count
    /// may include the scheduler's restarts. The scheduler's name wins, because names of other launchers are often
    /// random. Kiln's launcher marks its name as part of the scheduler's.
    pub(super) fn launched(self, name: Option<&str>, restarts: u64) -> Self {
        let name = name.map(str::to_owned);
        let name = match &self.name {
            Some(job) => name.filter(|name| is_inside(job, name)).or(self.name),
            None => name,
        };
        Job { name, restarts: self.restarts.max(restarts) }
    }
}

const INSIDE: char = '/';

fn is_inside(job: &str, name: &str) -> bool {
    name.strip_prefix(job).is_some_and(|rest| rest.starts_with(INSIDE))
}
