//! One process per rank, connected by MPI.
//!
//! Meant for clusters that run jobs with MPI, or whose network only MPI uses well. Start the processes with
//! `mpirun`; [`Mpi::start`] finds the rank, and [`Mpi::world`] joins the world.
//!
//! All messages are point-to-point messages of `MPI_COMM_WORLD`, with one tag per group. MPI's own
//! collectives are not used: a rank that has entered one cannot leave it, and `MPI_SUM` does not specify the
//! order of additions.
//!
//! Before an operation runs, the ranks agree that all of them have entered it, so that they can still give up
//! an operation that fails before then. They agree through small messages, which a thread of each process
//! receives: the first rank of a group decides, and all ranks follow its decisions in order. Only then do
//! they pass buffers to MPI, which cannot return a buffer early. If such a transfer does not finish although
//! the group has failed, for example because a process is stopped, `MPI_Abort` ends the job. When a process
//! dies, `mpirun` ends the job.

mod backend;
mod backoff;
mod exchange;
mod group;
mod inbox;
mod job;
mod message;
mod outbox;
mod runtime;
mod world;

pub use job::{Mpi, MpiCommunicator, MpiOptions};
pub use runtime::MpiError;
