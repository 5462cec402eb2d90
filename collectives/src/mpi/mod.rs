//! One process per rank, connected by MPI.
//!
//! For clusters that run jobs with MPI, or whose network only MPI uses well. Start the processes with
//! `mpirun`; [`Mpi::start`] finds the rank by itself, and [`Mpi::world`] joins the world.
//!
//! All messages are point-to-point messages of `MPI_COMM_WORLD`, with one tag per group. MPI's own
//! collectives are not used: a rank that has entered one cannot leave it, and `MPI_SUM` does not specify the
//! order of its additions.
//!
//! Ranks first agree that all of them have entered an operation, so that they can give up an operation that
//! has failed. They agree through small messages, for which a thread of each process listens: the first rank
//! of a group decides, and all ranks act in the order of its decisions. Only then do they pass buffers to
//! MPI, which has no way to return them early. If such a transfer does not end although the group has failed,
//! for example because a process is stopped, `MPI_Abort` ends the job. When a process dies, `mpirun` ends the
//! job.

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
