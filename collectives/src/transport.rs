//! What moves buffers on GPUs for a group whose workers move the memory of the host.
//!
//! The group remains in charge: it numbers and records the calls, and when something goes wrong it finds
//! the cause together with the other ranks. The transport queues the work on the GPU.

use crate::buffer::Buffer;
use crate::call::{ArgumentError, CallSite};
use crate::communicator::Communicator;
use crate::error::CommError;
use crate::member::{End, Payload};
use crate::recorder::{RecordId, Recorder};
use crate::work::Work;
use std::sync::Arc;
use std::time::Duration;

/// The buffers of an operation, all on a GPU.
pub(crate) enum Movement {
    AllGather { input: Arc<Buffer>, output: Buffer },
    ReduceScatter { input: Arc<Buffer>, output: Buffer },
    AllReduce { buffer: Buffer },
    Broadcast { buffer: Buffer, root: usize },
}

impl Movement {
    /// The buffers of `payload`; `None` if it has none.
    pub(crate) fn of<E>(payload: Payload<E>) -> Option<Movement> {
        match payload {
            Payload::AllGather { input, output } => Some(Movement::AllGather { input, output }),
            Payload::ReduceScatter { input, output } => {
                Some(Movement::ReduceScatter { input, output })
            }
            Payload::AllReduce { buffer } => Some(Movement::AllReduce { buffer }),
            Payload::Broadcast { buffer, root } => Some(Movement::Broadcast { buffer, root }),
            Payload::Barrier | Payload::Split { .. } | Payload::Nothing => None,
        }
    }
}

/// A rank's end of a transport between the GPUs of a group.
pub(crate) trait Transport: Send + Sync {
    /// Name of the backend that the group becomes by it.
    fn name(&self) -> &'static str;

    /// What is wrong with `output`, which is on a GPU; the input is on the same.
    fn refuse(&self, output: &Buffer) -> Option<ArgumentError>;

    /// Queues an operation and returns at once. Operations run in the order of the calls.
    fn enqueue(&self, site: CallSite, record: RecordId, movement: Movement) -> Work;

    /// Divides the transport like the group. Every rank of the group calls it, those without a place
    /// too.
    fn split(
        &self,
        site: &CallSite,
        place: Option<NewPlace<'_>>,
        timeout: Duration,
    ) -> Result<Option<Arc<dyn Transport>>, CommError>;

    /// Gives up what is under way, if anything, and lets go of the GPU.
    fn close(&self);
}

/// A rank's place in a group that has just been split off.
pub(crate) struct NewPlace<'a> {
    pub(crate) group: Arc<dyn Guardian>,
    pub(crate) control: &'a dyn Communicator,
    /// World rank of the group's first rank: no other group of the split has it.
    pub(crate) first: usize,
}

/// What a transport needs of the group it serves.
pub(crate) trait Guardian: Send + Sync {
    /// Why the group has failed, if it has.
    fn cause(&self, site: &CallSite) -> Option<CommError>;

    /// Fails the group because an operation takes too long; returns the cause.
    fn time_out(&self, site: &CallSite, waited: Duration) -> CommError;

    /// Fails all groups of the world.
    fn abort(&self, reason: &str);

    /// Does so on behalf of a call; returns the cause.
    fn give_up(&self, site: &CallSite, reason: &str) -> CommError;

    /// The rank's records.
    fn recorder(&self) -> &Recorder;
}

impl<E: End> Guardian for E {
    fn cause(&self, site: &CallSite) -> Option<CommError> {
        End::cause(self, site)
    }

    fn time_out(&self, site: &CallSite, waited: Duration) -> CommError {
        End::time_out(self, site, waited)
    }

    fn abort(&self, reason: &str) {
        End::abort(self, reason);
    }

    fn give_up(&self, site: &CallSite, reason: &str) -> CommError {
        End::abort(self, reason);
        End::give_up(self, site, reason)
    }

    fn recorder(&self) -> &Recorder {
        &self.shared().recorder
    }
}
