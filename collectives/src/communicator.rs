//! The interface of a group of ranks.

use crate::buffer::Buffer;
use crate::error::CommError;
use crate::flight::Flight;
use crate::label::Label;
use crate::recorder::Recorder;
use crate::work::Work;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// How long [`Communicator::split`] waits for the other ranks. Ranks split at start-up, where loading
/// may hold one of them back for long.
const SPLIT_TIMEOUT: Duration = Duration::from_secs(600);

/// One rank's membership in a group of ranks.
///
/// Every operation is collective: all ranks of the group must issue it, in the same order and
/// with matching arguments. The calls return at once; [`Work::wait`] returns the result. See
/// the [crate documentation](crate) for what holds for all backends.
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

    /// Name of the backend: `"local"`, `"tcp"`, `"mpi"` or `"fake"`.
    fn backend(&self) -> &'static str;

    /// Collects every rank's `input` in the `output` of all.
    ///
    /// `output` has `world_size` times the length of `input`; slot `r` of that length gets
    /// the input of rank `r`. Where ranks share memory ([`Communicator::shares_gathers`]), an output
    /// without memory ([`Buffer::unallocated`], then on all ranks) becomes one that all of them read.
    fn all_gather(&self, label: Label, input: Arc<Buffer>, output: Buffer) -> Work;

    /// Whether an all-gather of buffers on the host can fill one output for all ranks.
    fn shares_gathers(&self) -> bool {
        false
    }

    /// Sums the inputs of all ranks; each rank gets its own slice of the sum.
    ///
    /// `input` has `world_size` times the length of `output`; rank `r` gets slot `r`.
    fn reduce_scatter(&self, label: Label, input: Arc<Buffer>, output: Buffer) -> Work;

    /// Sums the buffers of all ranks; each rank gets the whole sum in its buffer.
    fn all_reduce(&self, label: Label, buffer: Buffer) -> Work;

    /// Overwrites every rank's buffer with the one of rank `root`.
    fn broadcast(&self, label: Label, buffer: Buffer, root: usize) -> Work;

    /// Completes when every rank has called it. Returns an empty buffer.
    fn barrier(&self, label: Label) -> Work;

    /// Divides the group, like `MPI_Comm_split`: ranks with the same `color` form a new group,
    /// numbered by `(key, old rank)`. `None` for `color` takes part without joining a group
    /// and returns `None`.
    ///
    /// Collective and blocking. Ranks of the same color must pass the same `name`. The new
    /// group shares this rank's recorder.
    ///
    /// # Errors
    ///
    /// As for any operation.
    fn split(
        &self,
        name: &str,
        color: Option<u32>,
        key: i64,
    ) -> Result<Option<Arc<dyn Communicator>>, CommError> {
        self.split_within(name, color, key, SPLIT_TIMEOUT)
    }

    /// [`Communicator::split`] that waits for the other ranks no longer than `timeout`.
    ///
    /// # Errors
    ///
    /// As for any operation.
    fn split_within(
        &self,
        name: &str,
        color: Option<u32>,
        key: i64,
        timeout: Duration,
    ) -> Result<Option<Arc<dyn Communicator>>, CommError>;

    /// Fails every pending and later operation of this group, and of all groups that descend
    /// from the same world, on all ranks, with [`CommError::Aborted`] carrying this rank and
    /// `reason`.
    ///
    /// Call it when this rank cannot go on, so that the others do not wait for a timeout.
    fn abort(&self, reason: &str);

    /// Machine of each rank of the group: equal numbers for ranks that share one. Numbers count
    /// from 0 in the order of the first rank on each.
    fn nodes(&self) -> Vec<usize>;

    /// What this rank knows right now, for the files that are written when a run fails.
    fn flight(&self) -> Flight;

    /// What this rank has communicated so far. One recorder per rank, shared by all groups
    /// split from one world.
    fn recorder(&self) -> &Arc<Recorder>;
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
