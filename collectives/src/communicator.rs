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

/// Time that [`Communicator::split`] waits for the other ranks. Ranks split at start-up, when loading may
/// delay one of them for long.
const SPLIT_TIMEOUT: Duration = Duration::from_secs(600);

/// The result of a split: this rank's new group, or `None` for a rank that joins none.
pub type SplitResult = Result<Option<Arc<dyn Communicator>>, CommError>;

/// One rank's membership in a group of ranks.
///
/// Every operation is collective: all ranks of the group must issue it, in the same order and with matching
/// arguments. The calls return at once; [`Work::wait`] returns the result. The [crate documentation](crate)
/// lists what all backends guarantee.
///
/// Invalid arguments on one rank fail the operation on every rank: with [`CommError::Invalid`] on that rank,
/// and with [`CommError::Mismatch`] on the others.
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

    /// Collects every rank's `input` in the `output` of all ranks.
    ///
    /// `output` is `world_size` times as long as `input`; the input of rank `r` becomes its chunk `r`. Where
    /// ranks share memory ([`Communicator::shares_gathers`]), all ranks may pass an output without memory
    /// ([`Buffer::unallocated`]). They then get buffers that read the same memory.
    fn all_gather(&self, label: Label, input: Arc<Buffer>, output: Buffer) -> Work;

    /// Returns whether an all-gather of host buffers can fill one output for all ranks.
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

    /// Completes when every rank has called it. Returns an empty buffer.
    fn barrier(&self, label: Label) -> Work;

    /// Divides the group, like `MPI_Comm_split`: ranks with the same `color` form a new group, ordered by
    /// `(key, old rank)`. A rank that passes `None` for `color` joins no group and gets `None`.
    ///
    /// Collective and blocking. Ranks of the same color must pass the same `name`. The new group shares this
    /// rank's recorder.
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

    /// Fails every pending and later operation of this group, and of all groups that descend from the same
    /// world, on all ranks, with [`CommError::Aborted`], which contains this rank and `reason`.
    ///
    /// Call it when this rank cannot continue, so that the others do not wait for a timeout.
    fn abort(&self, reason: &str);

    /// Marks this rank as held by a debugger or user, or releases it. While any rank is held, no wait of any
    /// rank of the world times out. Unless the backend [shares holds](Communicator::shares_holds), this applies
    /// to this rank's own waits only.
    fn hold(&self, is_held: bool);

    /// Returns whether [`Communicator::hold`] reaches all ranks of the world. MPI alone does not.
    fn shares_holds(&self) -> bool;

    /// Returns the held ranks of the world, and the total time for which any rank was held.
    fn holds(&self) -> &Holds;

    /// Returns why the group has failed, if it has.
    fn failure(&self) -> Option<CommError>;

    /// Returns the machine of each rank of the group, as a number: ranks on the same machine have the same
    /// number. Machines are numbered from 0 in the order of the first rank on each.
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
