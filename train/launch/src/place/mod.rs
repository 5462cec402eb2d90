//! The place of this process among the ranks of a job.
//!
//! Every launcher and scheduler describes the place of a process in its own variables. [`survey`] asks
//! these sources in a fixed order. The first source with an answer wins, and an invalid answer is an error
//! instead of a reason to ask the next source: a rank that wrongly believed to be alone would train by
//! itself.
//!
//! Everything here is a function of a lookup, so that it can be tested without touching the process's
//! environment; only [`find_here`] reads it.

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
