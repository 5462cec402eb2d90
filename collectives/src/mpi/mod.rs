//! One process per rank, connected by MPI.
//!
//! For clusters where MPI is what there is, and where it knows the network best. Start the
//! processes with `mpirun`; [`Mpi::start`] finds the rank by itself, [`Mpi::world`] joins the world.
//!
//! All messages are point-to-point messages of `MPI_COMM_WORLD`, groups told apart by tags:
//! MPI's own collectives cannot be left once entered, and `MPI_SUM` does not say in which order it
//! adds. So that a failed operation can be given up, ranks first agree that all of them have
//! entered it, through small messages that a thread per process listens for; the first rank of each
//! group decides, and everyone acts in the order of its decisions. Only then are buffers lent to
//! MPI, which has no way to take them back: if such a transfer does not end although the group has
//! failed, for example because a process is stopped, the job is ended with `MPI_Abort`. A process
//! that dies ends the job as well: that is `mpirun`'s doing.

mod backoff;
mod end;
mod exchange;
mod family;
mod group;
mod hub;
mod message;
mod runtime;

use crate::member::{Member, RankShared, WorkerStart};
use crate::recorder::{DEFAULT_CAPACITY, Recorder};
use family::Family;
use group::Group;
use runtime::Runtime;
use std::fmt;
use std::sync::Arc;

pub use end::MpiEnd;

/// A rank that is a process of an MPI job.
///
/// Use it from one thread: the order of calls is the order of operations. Dropping it leaves the
/// group: what is still pending fails with [`CommError::Aborted`](crate::CommError::Aborted) on all
/// ranks, and so does every later operation of the group.
pub type MpiCommunicator = Member<MpiEnd>;

/// Settings of a world of MPI processes; the same on all ranks.
#[derive(Clone)]
pub struct MpiOptions {
    /// Name of the group for logs. Default `"world"`.
    pub name: String,
    /// Number of records each rank keeps. Default [`DEFAULT_CAPACITY`].
    pub recorder_capacity: usize,
    /// Called with the world rank first thing on each worker thread. Default nothing.
    pub on_worker_start: Option<WorkerStart>,
}

impl Default for MpiOptions {
    fn default() -> MpiOptions {
        MpiOptions {
            name: "world".into(),
            recorder_capacity: DEFAULT_CAPACITY,
            on_worker_start: None,
        }
    }
}

impl fmt::Debug for MpiOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MpiOptions")
            .field("name", &self.name)
            .field("recorder_capacity", &self.recorder_capacity)
            .field("on_worker_start", &self.on_worker_start.is_some())
            .finish()
    }
}

/// Why MPI could not be started.
#[derive(Debug, thiserror::Error)]
pub enum MpiError {
    /// MPI can be started once per process only.
    #[error("MPI has been started in this process before; keep the first `Mpi` and clone it")]
    Started,
    /// Communication runs on threads of its own, several at once.
    #[error(
        "this MPI library grants thread level {granted}, Kiln needs Multiple; use one that is built \
         with support for threads"
    )]
    Threads {
        /// Level that the library grants.
        granted: String,
    },
    /// The system has no thread to give.
    #[error("cannot start a thread for MPI: {0}; look at the limits of this machine")]
    Thread(#[from] std::io::Error),
}

/// A process's part in an MPI job. MPI is shut down when the last clone and the last communicator
/// are dropped, which waits for all other processes to get there too, unless [`Mpi::give_up`] was called.
#[derive(Clone)]
pub struct Mpi(Arc<Runtime>);

impl Mpi {
    /// Starts MPI. All processes of the job must do so.
    ///
    /// # Errors
    ///
    /// [`MpiError`]
    pub fn start() -> Result<Mpi, MpiError> {
        Ok(Mpi(Arc::new(Runtime::start()?)))
    }

    /// Rank of this process.
    pub fn rank(&self) -> usize {
        self.0.hub().rank()
    }

    /// Number of processes.
    pub fn world_size(&self) -> usize {
        self.0.hub().size()
    }

    /// Leaves the job after a failure, without waiting for processes that may never come: what they were told
    /// is sent, and MPI is not shut down. Its communicators are of no more use, and this process has to end with
    /// an error, at which `mpirun` ends the others.
    pub fn give_up(&self) {
        self.0.give_up();
    }

    /// Joins a world of all processes. The n-th world of one process is the n-th of every other.
    pub fn world(&self, options: MpiOptions) -> MpiCommunicator {
        let hub = self.0.hub();
        let number = hub.next_world();
        let shared = Arc::new(RankShared {
            world_rank: hub.rank(),
            world_size: hub.size(),
            recorder: Arc::new(Recorder::new(options.recorder_capacity)),
            on_worker_start: options.on_worker_start,
        });
        let family = Arc::new(Family::new(number, &shared));
        let ranks = (0..hub.size()).collect();
        let group = Group::new(number, options.name.into(), ranks, hub, family);
        Member::start(MpiEnd::new(group, shared, Arc::clone(&self.0)))
    }
}

impl fmt::Debug for Mpi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (rank, size) = (self.rank(), self.world_size());
        f.debug_struct("Mpi").field("rank", &rank).field("world_size", &size).finish()
    }
}
