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
mod role;
mod slurm;
mod stray;
mod survey;
#[cfg(test)]
mod tests;
mod torchrun;
mod vars;

pub use error::EnvError;
pub use flags::Flags;
pub use hostlist::HostList;
pub use job::Job;
pub use node::{NodeFlags, node};
pub use role::{Master, Node, PerGpu, RankEnv, Role, Source};
pub use survey::{Considered, environment, find, find_here, survey};
pub use vars::{DEFAULT_PORT, JobSecret, Lookup, MAX_RANKS, MAX_RANKS_PER_NODE, SECRET};
