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

/// How long [`Communicator::split`] waits for the other ranks. Ranks split at start-up, when loading may
/// delay one of them for long.
const SPLIT_TIMEOUT: Duration = Duration::from_secs(600);

/// What a split returns: this rank's new group, or `None` for a rank that joins none.
pub type SplitResult = Result<Option<Arc<dyn Communicator>>, CommError>;

/// One rank's membership in a group of ranks.
///
/// Every operation is collective: all ranks of the group must issue it, in the same order and with matching
/// arguments. The calls return at once; [`Work::wait`] returns the result. The [crate documentation](crate)
/// lists the promises of all backends.
///
/// Arguments that are wrong on one rank fail the operation on every rank: with
/// [`CommError::Invalid`] where they were passed, with [`CommError::Mismatch`] elsewhere.
pub trait Communicator: Send + Sync {
    /// Number of this rank in the group, from 0.
    fn rank(&self) -> usize;

    /// Number of ranks in the group.
    fn world_size(&self) -> usize;

    /// Name of the group for logs, such as `"world"`, `"shard"` or `"replicate"`.
    fn name(&self) -> &str;

    /// Name of the backend: `"local"`, `"tcp"`, `"mpi"` or `"fake"`, and `"nccl"` for a group that NCCL has
    /// been added to.
    fn backend(&self) -> &'static str;

    /// Collects every rank's `input` in the `output` of all.
    ///
    /// `output` is `world_size` times as long as `input`; the input of rank `r` becomes chunk `r` of it.
    /// Where ranks share memory ([`Communicator::shares_gathers`]), all of them may pass an output without
    /// memory ([`Buffer::unallocated`]). They then get buffers that read the same memory.
    fn all_gather(&self, label: Label, input: Arc<Buffer>, output: Buffer) -> Work;

    /// Whether an all-gather of buffers on the host can fill one output for all ranks.
    fn shares_gathers(&self) -> bool {
        false
    }

    /// Sums the inputs of all ranks; each rank gets its own chunk of the sum.
    ///
    /// `input` is `world_size` times as long as `output`; rank `r` gets chunk `r`.
    fn reduce_scatter(&self, label: Label, input: Arc<Buffer>, output: Buffer) -> Work;

    /// Sums the buffers of all ranks; each rank gets the whole sum in its buffer.
    fn all_reduce(&self, label: Label, buffer: Buffer) -> Work;

    /// Overwrites every rank's buffer with that of rank `root`.
    fn broadcast(&self, label: Label, buffer: Buffer, root: usize) -> Work;

    /// Completes when every rank has called it. Returns an empty buffer.
    fn barrier(&self, label: Label) -> Work;

    /// Divides the group, like `MPI_Comm_split`: ranks with the same `color` form a new group,
    /// numbered by `(key, old rank)`. A rank that passes `None` for `color` joins no group and gets `None`.
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

    /// As [`Communicator::split`], but waits for the other ranks no longer than `timeout`.
    ///
    /// # Errors
    ///
    /// As for any operation.
    fn split_within(&self, name: &str, color: Option<u32>, key: i64, timeout: Duration) -> SplitResult;

    /// Fails every pending and later operation of this group, and of all groups that descend from the same
    /// world, on all ranks, with [`CommError::Aborted`] carrying this rank and `reason`.
    ///
    /// Call it when this rank cannot go on, so that the others do not wait for a timeout.
    fn abort(&self, reason: &str);

    /// Says that somebody holds this rank to look into it, or no longer. Meanwhile no wait of any rank of the
    /// world times out; with MPI, no wait of this rank.
    fn hold(&self, is_held: bool);

    /// Which ranks of the world are held, and for how long any was.
    fn holds(&self) -> &Holds;

    /// Why the group has failed, if it has.
    fn failure(&self) -> Option<CommError>;

    /// Machine of each rank of the group, as a number: ranks on the same machine have the same number.
    /// Machines are numbered from 0 in the order of the first rank on each.
    fn nodes(&self) -> Vec<usize>;

    /// The contents of this rank's flight recorder right now, for the files that are written when a run
    /// fails.
    fn flight(&self) -> Flight;

    /// This rank's flight recorder, which all groups split from one world share.
    fn recorder(&self) -> &Arc<Recorder>;

    /// A look at this rank and its world from outside, for what tells people about a run that goes on.
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
