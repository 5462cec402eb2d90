//! The interface of a group of ranks.

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

/// Default limit of the wait in [`Communicator::split`] for the other ranks. Ranks split at start-up, when
/// loading may delay one of them for a long time.
const SPLIT_TIMEOUT: Duration = Duration::from_secs(600);

/// The result of a split: this rank's new group, or `None` for a rank that joins none.
pub type SplitResult = Result<Option<Arc<dyn Communicator>>, CommError>;

/// One rank's membership in a group.
///
/// Every operation is collective: all ranks of the group must issue it, in the same order and with matching
/// arguments. The calls return immediately; [`Work::wait`] returns the result. The [crate
/// documentation](crate) lists what all backends guarantee.
///
/// Invalid arguments on one rank fail the operation on every rank: that rank gets [`CommError::Invalid`], the
/// others [`CommError::Mismatch`].
pub trait Communicator: Send + Sync {
    /// Returns this rank's number in the group, from 0.
    fn rank(&self) -> usize;

    /// Returns the number of ranks in the group.
    fn world_size(&self) -> usize;

    /// Returns the name of the group for logs, such as `"world"`, `"shard"` or `"replicate"`.
    fn name(&self) -> &str;

    /// Returns the name of the backend for logs: `"local"`, `"tcp"`, `"mpi"` or `"fake"`, or `"nccl"` for a
    /// group with NCCL attached.
    fn backend(&self) -> &'static str;

    /// Returns whether all ranks of the world are threads of this process.
    fn is_one_process(&self) -> bool;

    /// Collects every rank's `input` in the `output` of each rank.
    ///
    /// `output` is `world_size` times as long as `input`, and its chunk `r` is the input of rank `r`. If the
    /// ranks share memory ([`Communicator::shares_gathers`]), all ranks may pass an output without memory
    /// ([`Buffer::unallocated`]); the returned buffers then read the same memory.
    fn all_gather(&self, label: Label, input: Arc<Buffer>, output: Buffer) -> Work;

    /// Returns whether an all-gather of host buffers can fill one output that all ranks read.
    fn shares_gathers(&self) -> bool {
        false
    }

    /// Sums the inputs of all ranks; each rank gets its own chunk of the sum.
    ///
    /// `input` is `world_size` times as long as `output`; rank `r` gets chunk `r`.
    fn reduce_scatter(&self, label: Label, input: Arc<Buffer>, output: Buffer) -> Work;

    /// Sums the buffers of all ranks; each rank gets the whole sum in its buffer.
    fn all_reduce(&self, label: Label, buffer: Buffer) -> Work;

    /// Overwrites every rank's buffer with the buffer of rank `root`.
    fn broadcast(&self, label: Label, buffer: Buffer, root: usize) -> Work;

    /// Completes when every rank has called `barrier`. Returns an empty buffer.
    fn barrier(&self, label: Label) -> Work;

    /// Divides the group, like `MPI_Comm_split`: ranks with the same `color` form a new group, ordered by
    /// `(key, old rank)`. A rank that passes `None` for `color` joins no group and gets `None`.
    ///
    /// Collective and blocking. Ranks of the same color must pass the same `name`. All groups of a rank share
    /// its recorder.
    ///
    /// # Errors
    ///
    /// As for any operation.
    fn split(&self, name: &str, color: Option<u32>, key: i64) -> SplitResult {
        self.split_within(name, color, key, SPLIT_TIMEOUT)
    }

    /// Like [`Communicator::split`], but waits at most `timeout` for the other ranks.
    ///
    /// # Errors
    ///
    /// As for any operation.
    fn split_within(&self, name: &str, color: Option<u32>, key: i64, timeout: Duration) -> SplitResult;

    /// Fails every pending and later operation on all ranks, in this group and all other groups of the same
    /// world. The operations return [`CommError::Aborted`], which contains this rank and `reason`.
    ///
    /// Call this when the rank cannot continue, so that the other ranks do not wait for a timeout.
    fn abort(&self, reason: &str);

    /// Marks this rank as held by a debugger or user, or releases it. While any rank is held, no wait of any
    /// rank of the world times out. If the backend does not [share holds](Communicator::shares_holds), a hold
    /// suspends only the waits of the held rank.
    fn hold(&self, is_held: bool);

    /// Returns whether [`Communicator::hold`] reaches all ranks of the world. With MPI, it does not.
    fn shares_holds(&self) -> bool;

    /// Returns the held ranks of the world, and the total time for which any rank was held.
    fn holds(&self) -> &Holds;

    /// Returns the cause of the group's failure, or `None` if the group has not failed.
    fn failure(&self) -> Option<CommError>;

    /// Returns the machine number of each rank of the group; ranks on one machine have the same number.
    /// Machines are numbered from 0 in the order of their first ranks.
    fn nodes(&self) -> Vec<usize>;

    /// Returns the current contents of this rank's flight recorder, for the files that a failing run writes.
    fn flight(&self) -> Flight;

    /// Returns this rank's flight recorder, which all groups split from one world share.
    fn recorder(&self) -> &Arc<Recorder>;

    /// Returns a view of this rank and its world for monitoring a live run from another thread.
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
