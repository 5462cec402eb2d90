//! The operations of a communicator that have been issued and are not known to be done.

use super::cuda::Events;
use crate::call::CallSite;
use crate::recorder::RecordId;
use crate::sync::lock;
use cubecl_runtime::server::BufferBinding;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, Weak};
use std::time::Instant;

/// Operations under way, oldest first.
#[derive(Default)]
pub(super) struct InFlight {
    pub(super) queue: VecDeque<QueuedOperation>,
    /// The last operation that is done. Errors name it when no operation is under way.
    pub(super) last: Option<CallSite>,
    /// The rank leaves the group.
    pub(super) closing: bool,
}

/// An operation that is queued on the GPU or on its way there.
pub(super) struct QueuedOperation {
    pub(super) site: CallSite,
    pub(super) record: RecordId,
    pub(super) issued: Instant,
    pub(super) progress: Arc<Progress>,
    /// Holds its memory, which must be neither freed, nor reused, nor moved.
    pub(super) buffers: [BufferBinding; 2],
}

/// The stage of an operation, shared by the threads that work on it. Dropping it gives the operation's events
/// back for later operations.
pub(super) struct Progress {
    pub(super) stage: Mutex<Stage>,
    spare: Weak<Mutex<Vec<Events>>>,
}

impl Progress {
    pub(super) fn new(spare: &Arc<Mutex<Vec<Events>>>) -> Progress {
        Progress { stage: Mutex::new(Stage::Queued), spare: Arc::downgrade(spare) }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        let stage = std::mem::replace(&mut *lock(&self.stage), Stage::Queued);
        if let (Stage::Running(events), Some(spare)) = (stage, self.spare.upgrade()) {
            lock(&spare).push(events);
        }
    }
}

/// How far an operation has come.
pub(super) enum Stage {
    /// Submitted to CubeCL's thread.
    Queued,
    /// Queued on the GPU.
    Running(Events),
    /// It could not be queued on the GPU, for this reason.
    Failed(String),
}
