//! One process per rank, connected by MPI.
//!
//! For clusters that run jobs with MPI, or whose network only MPI uses well. Start the processes with `mpirun`;
//! [`Mpi::start`] finds the rank, and [`Mpi::world`] joins the world.
//!
//! All messages are point-to-point messages of `MPI_COMM_WORLD`, with one tag per group. A rank could not leave one of
//! MPI's own collectives, and `MPI_SUM` does not specify the order of additions.
//!
//! Before an operation runs, small messages establish that all ranks have entered it, so that ranks can give up
//! earlier. The first rank of a group decides, and all ranks follow in order. Only then does MPI get buffers, which it
//! cannot return early. If such a transfer does not finish although the group has failed, `MPI_Abort` ends the job.
//! When a process dies,
//! `mpirun` ends the job.

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
