//! Where this process stands among the ranks of a job.
//!
//! Launchers and schedulers tell a process its place in variables, each in its own. [`survey`] asks
//! them in a fixed order; the first that has an answer wins, and a wrong answer is an error instead
//! of a reason to ask the next one: a rank that believed to be alone would train for itself.
//!
//! Everything here is a function of a lookup, so that it can be tested without touching the
//! process's environment; [`find_here`] is the one that does.

mod error;
mod flags;
mod hostlist;
mod job;
mod jobset;
mod mpi;
mod node;
mod pet;
mod ranks;
mod slurm;
mod stray;
#[cfg(test)]
mod tests;
mod torchrun;
mod vars;

use std::fmt;
use std::sync::Once;

pub use error::PlaceError;
pub use flags::Flags;
pub use hostlist::HostList;
pub use job::Job;
pub use node::{NodeFlags, PerGpu, node};
pub use vars::{DEFAULT_PORT, Lookup, MAX_RANKS, MAX_RANKS_PER_NODE, SECRET};

use error::shortened;
use vars::Vars;

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

impl Source {
    /// All of them, in order.
    pub const ALL: [Source; 7] = [
        Source::Flags,
        Source::Torchrun,
        Source::Pet,
        Source::Slurm,
        Source::OpenMpi,
        Source::Pmi,
        Source::JobSet,
    ];
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
#[derive(Clone, PartialEq, Eq)]
pub struct Place {
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
    /// The node. MPI launchers do not tell; the number is then a guess from the ranks. Group ranks
    /// by `node`.
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
    pub secret: Option<String>,
}

/// The place of a process that starts the ranks of its node.
#[derive(Clone, PartialEq, Eq)]
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
    pub secret: Option<String>,
    /// How often to start the ranks again after a failure.
    pub max_restarts: u64,
}

// Written by hand so that no log ever shows the secret.
impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_struct("Place")
            .field("source", &self.source)
            .field("rank", &self.rank)
            .field("world_size", &self.world_size)
            .field("local_rank", &self.local_rank)
            .field("local_world_size", &self.local_world_size)
            .field("node_rank", &self.node_rank)
            .field("node", &self.node)
            .field("master", &self.master)
            .field("meeting", &self.meeting)
            .field("job", &self.job)
            .field("secret", &self.secret.as_ref().map(|_| "…"))
            .finish()
    }
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_struct("Node")
            .field("source", &self.source)
            .field("node_rank", &self.node_rank)
            .field("nodes", &self.nodes)
            .field("nproc_per_node", &self.nproc_per_node)
            .field("per_gpu", &self.per_gpu)
            .field("master", &self.master)
            .field("job", &self.job)
            .field("secret", &self.secret.as_ref().map(|_| "…"))
            .field("max_restarts", &self.max_restarts)
            .finish()
    }
}

/// What this process is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
    /// Train by itself, with ranks as threads, as the only process of this job.
    Alone(Job),
    /// Be one rank of a job.
    Rank(Place),
    /// Start the ranks of a node and watch over them.
    Node(Node),
}

/// What a source had to say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Considered {
    /// The source.
    pub source: Source,
    /// Its variables that are set, with values shortened.
    pub found: Vec<(String, String)>,
    /// Why it was taken or passed over.
    pub verdict: String,
}

/// What a source makes of its variables.
enum Finding {
    /// This is the answer, and why.
    Taken(Role, String),
    /// Not this source, and why.
    Passed(String),
}

/// Finds the role of a process that has no flags. Never panics, and needs memory in proportion to
/// the values alone, whatever they say.
pub fn find(lookup: &Lookup) -> Result<(Role, Vec<Considered>), PlaceError> {
    let (role, considered) = survey(&Flags::default(), lookup);
    Ok((role?, considered))
}

/// The role of this process. Says once if it is alone though variables speak of several ranks.
pub fn find_here(flags: &Flags) -> Result<Role, PlaceError> {
    static TOLD: Once = Once::new();
    let role = survey(flags, &environment).0?;
    if let (Role::Alone(_), Some(remark)) = (&role, stray::remark(&environment)) {
        TOLD.call_once(|| tracing::warn!("{remark}"));
    }
    Ok(role)
}

/// A variable of this process, or its host name where a shell has not exported it.
pub fn environment(name: &str) -> Option<String> {
    let value = std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    if name == "HOSTNAME" && value.is_none() {
        return Some(rustix::system::uname().nodename().to_string_lossy().into_owned());
    }
    value
}

/// Asks every source; says what came of each, also when one of them is wrong.
pub fn survey(flags: &Flags, lookup: &Lookup) -> (Result<Role, PlaceError>, Vec<Considered>) {
    // Where the ranks meet may be given by flags whoever tells the rest.
    let overlaid = |name: &str| flags.overlay(name).or_else(|| lookup(name));
    let vars = Vars(&overlaid);
    let mut considered = Vec::new();
    let mut outcome = None;
    for source in Source::ALL {
        let found = match source {
            Source::Flags => flags.found(),
            _ => names(source)
                .iter()
                .filter_map(|name| Some(((*name).to_owned(), shortened(&lookup(name)?))))
                .collect(),
        };
        let verdict = match &outcome {
            Some((winner, Ok(_))) => format!("not asked: {winner} comes first"),
            Some((winner, Err(_))) => format!("not asked: {winner} is wrong"),
            None => match read(source, flags, &vars) {
                Ok(Finding::Taken(role, why)) => {
                    outcome = Some((source, Ok(role)));
                    format!("taken: {why}")
                }
                Ok(Finding::Passed(why)) => format!("passed over: {why}"),
                Err(error) => {
                    let verdict = format!("wrong: {error}");
                    outcome = Some((source, Err(error)));
                    verdict
                }
            },
        };
        considered.push(Considered { source, found, verdict });
    }
    let role = match outcome {
        Some((_, role)) => role,
        // Somebody meant this process to be one of several.
        None if !flags.found().is_empty() => Err(PlaceError::missing(
            "--rank",
            "where to meet is given, but not who meets; add --rank and --world-size",
        )),
        None => Ok(Role::Alone(Job::of_scheduler(&vars))),
    };
    (role, considered)
}

fn read(source: Source, flags: &Flags, vars: &Vars) -> Result<Finding, PlaceError> {
    match source {
        Source::Flags => flags.read(vars),
        Source::Torchrun => torchrun::read(vars),
        Source::Pet => pet::read(vars),
        Source::Slurm => slurm::read(vars),
        Source::OpenMpi => mpi::read_open_mpi(vars),
        Source::Pmi => mpi::read_pmi(vars),
        Source::JobSet => jobset::read(vars),
    }
}

/// The variables that a source reads; the secret is none of them.
fn names(source: Source) -> &'static [&'static str] {
    match source {
        Source::Flags => &[],
        Source::Torchrun => torchrun::NAMES,
        Source::Pet => pet::NAMES,
        Source::Slurm => slurm::NAMES,
        Source::OpenMpi => mpi::OPEN_MPI,
        Source::Pmi => mpi::PMI,
        Source::JobSet => jobset::NAMES,
    }
}
