//! A process's membership in an MPI job, and the worlds that it joins.

use super::backend::MpiBackend;
use super::group::Group;
use super::runtime::{MpiError, Runtime};
use super::world::World;
use crate::backend::{RankShared, WorkerStart};
use crate::process_group::ProcessGroup;
use crate::recorder::DEFAULT_CAPACITY;
use std::fmt;
use std::sync::Arc;

/// A rank that is a process of an MPI job. Use it from one thread, because the order of calls is the order of
/// operations. Dropping it leaves the group: pending and later operations fail with
/// [`CommError::Aborted`](crate::CommError::Aborted) on all ranks.
pub type MpiCommunicator = ProcessGroup<MpiBackend>;

/// Settings of a world of MPI processes; must be equal on all ranks.
#[derive(Clone, Debug)]
pub struct MpiOptions {
    /// Number of records that each rank keeps. Default [`DEFAULT_CAPACITY`].
    pub recorder_capacity: usize,
    /// Runs first on every worker thread, with the world rank as its argument. Default none.
    pub on_worker_start: Option<WorkerStart>,
}

impl Default for MpiOptions {
    fn default() -> MpiOptions {
        MpiOptions { recorder_capacity: DEFAULT_CAPACITY, on_worker_start: None }
    }
}

/// A process's membership in an MPI job. MPI shuts down once all clones and communicators have been dropped, and waits
/// for all other processes, unless [`Mpi::give_up`] was called.
#[derive(Clone)]
pub struct Mpi(Arc<Runtime>);

impl Mpi {
    /// Starts MPI. All processes of the job must call it.
    ///
    /// # Errors
    ///
    /// [`MpiError`]
    pub fn start() -> Result<Mpi, MpiError> {
        Ok(Mpi(Arc::new(Runtime::start()?)))
    }

    /// Rank of this process.
    pub fn rank(&self) -> usize {
        self.0.inbox.outbox.rank
    }

    /// Number of processes.
    pub fn world_size(&self) -> usize {
        self.0.inbox.outbox.size()
    }

    /// Leaves the job after a failure, without waiting for other processes or shutting MPI down. Posted messages are
    /// still sent. Afterwards communicators are unusable, and this process must exit with an error, so that `mpirun`
    /// ends the others.
    pub fn give_up(&self) {
        self.0.give_up();
    }

    /// Joins a world of all processes. The n-th call on each process joins the same world.
    pub fn world(&self, options: MpiOptions) -> MpiCommunicator {
        let (outbox, MpiOptions { recorder_capacity, on_worker_start }) = (&self.0.inbox.outbox, options);
        let (rank, size, number) = (outbox.rank, outbox.size(), outbox.next_world());
        let node = &outbox.node_names[rank];
        let shared = RankShared::new(rank, size, node, recorder_capacity, Arc::default(), on_worker_start);
        let world = Arc::new(World::new(number, &shared));
        let group = Group::new(number, "world", (0..size).collect(), &shared, outbox, world);
        ProcessGroup::start(MpiBackend::new(group, Arc::clone(&self.0)))
    }
}

impl fmt::Debug for Mpi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (rank, size) = (self.rank(), self.world_size());
        f.debug_struct("Mpi").field("rank", &rank).field("world_size", &size).finish()
    }
}
