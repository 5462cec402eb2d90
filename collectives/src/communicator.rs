use crate::buffer::Buffer;
use crate::error::CommError;
use crate::flight::Flight;
use crate::holds::Holds;
use crate::label::Label;
use crate::rank_view::RankView;
use crate::recorder::Recorder;
use crate::work::Work;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Default timeout of [`Communicator::split`]. Long, because loading may delay ranks at start-up.
const SPLIT_TIMEOUT: Duration = Duration::from_secs(600);

/// The result of a split: this rank's new group, or `None` for a rank that joins none.
pub type SplitResult = Result<Option<Arc<dyn Communicator>>, CommError>;

/// One rank's membership in a group. Every operation is collective: all ranks of the group issue it, in the same order
/// and with matching arguments. Calls return immediately; [`Work::wait`] returns the result. The [crate
/// documentation](crate) lists the guarantees of all backends.
///
/// A rank with invalid arguments gets [`CommError::Invalid`], and the others get [`CommError::Mismatch`].
pub trait Communicator: Send + Sync {
    /// This rank's number in the group, from 0.
    fn rank(&self) -> usize;

    /// Number of ranks in the group.
    fn world_size(&self) -> usize;

    /// Name of the group, such as `"world"`, `"shard"` or `"replicate"`.
    fn name(&self) -> &str;

    /// Name of the backend: `"local"`, `"tcp"`, `"mpi"`, `"fake"`, or `"nccl"` for a group with NCCL attached.
    fn backend(&self) -> &'static str;

    /// Returns whether all ranks of the world are threads of this process.
    fn is_one_process(&self) -> bool;

    /// Collects every rank's `input` in the `output` of each rank, which is `world_size` times as long; chunk `r` is
    /// the input of rank `r`. If the ranks share memory ([`Communicator::shares_gathers`]), all ranks may pass an
    /// output without memory ([`Buffer::unallocated`]), and the returned buffers share memory.
    fn all_gather(&self, label: Label, input: Arc<Buffer>, output: Buffer) -> Work;

    /// Returns whether an all-gather of host buffers can fill one output that all ranks read.
    fn shares_gathers(&self) -> bool {
        false
    }

    /// Sums the inputs; rank `r` gets chunk `r` of the sum. `input` is `world_size` times as long as `output`.
    fn reduce_scatter(&self, label: Label, input: Arc<Buffer>, output: Buffer) -> Work;

    /// Sums the buffers of all ranks; each rank gets the whole sum in its buffer.
    fn all_reduce(&self, label: Label, buffer: Buffer) -> Work;

    /// Overwrites every rank's buffer with the buffer of rank `root`.
    fn broadcast(&self, label: Label, buffer: Buffer, root: usize) -> Work;

    /// Completes when every rank has called `barrier`. Returns an empty buffer.
    fn barrier(&self, label: Label) -> Work;

    /// Divides the group, like `MPI_Comm_split`: ranks with the same `color` and `name` form a new group, ordered by
    /// `(key, old rank)`. A rank with color `None` gets `None`. Collective and blocking. All groups of a rank share its
    /// recorder.
    ///
    /// # Errors
    ///
    /// The errors of any operation.
    fn split(&self, name: &str, color: Option<u32>, key: i64) -> SplitResult {
        self.split_within(name, color, key, SPLIT_TIMEOUT)
    }

    /// Like [`Communicator::split`], with a time limit.
    ///
    /// # Errors
    ///
    /// The errors of any operation.
    fn split_within(&self, name: &str, color: Option<u32>, key: i64, timeout: Duration) -> SplitResult;

    /// Fails every pending and later operation of all groups of the world, on all ranks, with [`CommError::Aborted`].
    /// Call it when this rank cannot continue, so that the others do not wait for a timeout.
    fn abort(&self, reason: &str);

    /// Marks this rank as held by a debugger or user, or releases it. While a rank is held, no wait in the world times
    /// out. If the backend does not [share holds](Communicator::shares_holds), only the held rank's waits are
    /// suspended.
    fn hold(&self, is_held: bool);

    /// Returns whether [`Communicator::hold`] reaches all ranks of the world. With MPI, it does not.
    fn shares_holds(&self) -> bool;

    /// The held ranks of the world, and the total time for which any rank was held.
    fn holds(&self) -> &Holds;

    /// Returns why the group has failed, if it has.
    fn failure(&self) -> Option<CommError>;

    /// Returns the machine number of each rank. Machines are numbered from 0 in the order of their first ranks.
    fn nodes(&self) -> Vec<usize>;

    /// Returns this rank's flight, for the files of a failing run.
    fn flight(&self) -> Flight;

    /// This rank's flight recorder, which all groups split from one world share.
    fn recorder(&self) -> &Arc<Recorder>;

    /// Returns a view of this rank and its world, for monitoring from another thread.
    fn view(&self) -> RankView;
}

impl fmt::Debug for dyn Communicator + '_ {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Communicator")
            .field("backend", &self.backend())
            .field("name", &self.name())
            .field("rank", &self.rank())
            .field("world_size", &self.world_size())
            .finish()
    }
}
