//! What the backends of a process group implement, and what they are given.

use crate::buffer::Buffer;
use crate::call::{ArgumentError, Call, CallSite};
use crate::dtype::DType;
use crate::error::CommError;
use crate::flight::Flight;
use crate::recorder::Recorder;
use crate::verdict::Verdict;
use std::sync::Arc;
use std::time::Duration;

/// Called with the world rank, first thing on each worker thread.
pub type WorkerStart = Arc<dyn Fn(usize) + Send + Sync>;

/// What carries out the operations of one group on one rank. Dropping it, or [`Backend::leave`], leaves the
/// group.
pub trait Backend: Send + Sync + Sized + 'static {
    /// Name of the backend, as [`Communicator::backend`](crate::Communicator::backend) returns it.
    const NAME: &'static str;

    /// As [`Communicator::shares_gathers`](crate::Communicator::shares_gathers).
    const SHARES_GATHERS: bool = false;

    /// Name of the group.
    fn name(&self) -> &Arc<str>;

    /// World rank of each rank of the group.
    fn world_ranks(&self) -> &[usize];

    /// This rank's number in the group.
    fn rank(&self) -> usize;

    /// What all groups of this rank share.
    fn shared(&self) -> &Arc<RankShared>;

    /// Machine of each rank, as for [`Communicator::nodes`](crate::Communicator::nodes).
    fn nodes(&self) -> Vec<usize>;

    /// Name of this rank's machine, for people.
    fn node_name(&self) -> String;

    /// Notes that the caller has issued the operation at `site`. Called before the operation is queued.
    fn issued(&self, site: &CallSite, call: &Call);

    /// What stands in the way of a call whose buffers are on a GPU. Only asked about such calls.
    fn refuse_device(&self, _payload: &Payload) -> Option<ArgumentError> {
        Some(ArgumentError::NoDeviceTransport)
    }

    /// Runs one operation, on the worker thread. Work for a GPU joins the queue of the thread that issued
    /// the operation.
    fn execute(&self, site: &CallSite, call: Call, payload: Payload) -> Result<Buffer, CommError>;

    /// Runs a split, on the worker thread. Returns this rank's backend of its new group, if it joins one.
    fn split(&self, site: &CallSite, call: Call) -> Result<Option<Self>, CommError>;

    /// Fails the group on behalf of the caller, unless it has failed already; returns the cause.
    fn give_up(&self, site: &CallSite, reason: &str) -> CommError;

    /// Fails the group because a wait timed out, unless it has failed already; returns the cause.
    fn time_out(&self, site: &CallSite, waited: Duration) -> CommError;

    /// Notes that the worker thread has stopped, perhaps in the middle of an operation.
    fn crash(&self, reason: &str);

    /// Why the group has failed, if it has.
    fn cause(&self, site: &CallSite) -> Option<CommError>;

    /// Fails all groups of the world, on all ranks.
    fn abort(&self, reason: &str);

    /// Leaves the group. Interrupts an operation under way that needs other ranks.
    fn leave(&self);

    /// The verdict of all ranks together after a failure.
    fn verdict(&self) -> Option<Verdict>;
}

/// What all groups of one rank share.
pub struct RankShared {
    /// Rank in the world.
    pub world_rank: usize,
    /// Number of ranks in the world.
    pub world_size: usize,
    /// Flight recorder of all groups.
    pub recorder: Arc<Recorder>,
    /// Called first thing on each worker thread.
    pub on_worker_start: Option<WorkerStart>,
}

impl RankShared {
    /// The flight recorder's contents, without a verdict.
    pub(crate) fn flight(&self, backend: &str, node: String) -> Flight {
        Flight {
            rank: self.world_rank,
            world_size: self.world_size,
            backend: backend.to_owned(),
            node,
            process: std::process::id(),
            activity: self.recorder.activity(),
            groups: self.recorder.groups(),
            verdict: None,
            records: self.recorder.records(),
            clock: self.recorder.clock(),
            stall: None,
        }
    }
}

/// The buffers of an operation.
pub enum Payload {
    /// Of an all-gather.
    AllGather {
        /// This rank's chunk.
        input: Arc<Buffer>,
        /// The chunks of all ranks.
        output: Buffer,
    },
    /// Of a reduce-scatter.
    ReduceScatter {
        /// This rank's addend.
        input: Arc<Buffer>,
        /// This rank's chunk of the sum.
        output: Buffer,
    },
    /// Of an all-reduce.
    AllReduce {
        /// This rank's addend, then the sum.
        buffer: Buffer,
    },
    /// Of a broadcast.
    Broadcast {
        /// The root's buffer is sent, those of the others are overwritten.
        buffer: Buffer,
        /// The rank that sends.
        root: usize,
    },
    /// A barrier or a split, or a call with invalid arguments, which is still posted so that all ranks learn
    /// of it.
    Nothing,
}

#[cfg(feature = "cuda")]
impl Payload {
    /// The buffer that the operation fills.
    pub(crate) fn output(&self) -> Option<&Buffer> {
        match self {
            Payload::AllGather { output, .. } | Payload::ReduceScatter { output, .. } => Some(output),
            Payload::AllReduce { buffer } | Payload::Broadcast { buffer, .. } => Some(buffer),
            Payload::Nothing => None,
        }
    }
}

/// Numbers the machines of ranks, in the order of the first rank on each; `names` has one per rank.
pub(crate) fn number_nodes<'a>(names: impl Iterator<Item = &'a str>) -> Vec<usize> {
    let mut known: Vec<&str> = Vec::new();
    names
        .map(|name| {
            known.iter().position(|other| *other == name).unwrap_or_else(|| {
                known.push(name);
                known.len() - 1
            })
        })
        .collect()
}

/// The result of operations that fill no buffer.
pub(crate) fn empty() -> Buffer {
    Buffer::zeros(DType::U8, 0)
}
