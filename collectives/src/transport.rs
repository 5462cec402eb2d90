//! The interface of what moves buffers on GPUs for a group whose backend moves the memory of the host.
//!
//! The group stays in charge: it numbers and records the calls, and after a failure it finds the cause
//! together with the other ranks. The transport queues the work on the GPU.

use crate::backend::{Backend, Payload};
use crate::buffer::Buffer;
use crate::call::{ArgumentError, CallSite};
use crate::communicator::Communicator;
use crate::error::CommError;
use crate::recorder::{RecordId, Recorder};
use crate::work::Work;
use std::sync::Arc;
use std::time::Duration;

/// What moves buffers between the GPUs of a group, on one rank.
pub(crate) trait Transport: Send + Sync {
    /// Name of the backend that the group gets from it.
    fn name(&self) -> &'static str;

    /// What is wrong with `output`, which is on a GPU; the input is on the same GPU.
    fn refuse(&self, output: &Buffer) -> Option<ArgumentError>;

    /// Queues an operation, whose buffers are on one GPU, and returns at once. Operations run in the order of
    /// the calls.
    fn enqueue(&self, site: CallSite, record: RecordId, payload: Payload) -> Work;

    /// Splits the transport like the group, and returns that of this rank's new group. Every rank of the
    /// group calls it, also a rank without a new group.
    fn split(
        &self,
        site: &CallSite,
        new_group: Option<SplitGroup<'_>>,
        timeout: Duration,
    ) -> Result<Option<Arc<dyn Transport>>, CommError>;

    /// Ends operations under way and releases the GPU.
    fn close(&self);
}

/// A rank's new group of a split that is under way.
pub(crate) struct SplitGroup<'a> {
    pub(crate) control: Arc<dyn ControlGroup>,
    pub(crate) communicator: &'a dyn Communicator,
    /// World rank of the group's first rank: no other new group of the split has it.
    pub(crate) first_world_rank: usize,
}

/// The group in charge of a transport: it knows of failures and tells the other ranks of them.
pub(crate) trait ControlGroup: Send + Sync {
    /// Why the group has failed, if it has.
    fn cause(&self, site: &CallSite) -> Option<CommError>;

    /// Fails the group because an operation takes too long; returns the cause.
    fn time_out(&self, site: &CallSite, waited: Duration) -> CommError;

    /// Fails all groups of the world.
    fn abort(&self, reason: &str);

    /// Fails all groups of the world on behalf of a call; returns the cause.
    fn give_up(&self, site: &CallSite, reason: &str) -> CommError;

    /// The rank's flight recorder.
    fn recorder(&self) -> &Recorder;
}

impl<B: Backend> ControlGroup for B {
    fn cause(&self, site: &CallSite) -> Option<CommError> {
        Backend::cause(self, site)
    }

    fn time_out(&self, site: &CallSite, waited: Duration) -> CommError {
        Backend::time_out(self, site, waited)
    }

    fn abort(&self, reason: &str) {
        Backend::abort(self, reason);
    }

    fn give_up(&self, site: &CallSite, reason: &str) -> CommError {
        Backend::abort(self, reason);
        Backend::give_up(self, site, reason)
    }

    fn recorder(&self) -> &Recorder {
        &self.shared().recorder
    }
}
