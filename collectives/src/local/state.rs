//! The state that the ranks of a group lock and wait on.

use super::slot::Slot;
use crate::call::CallSite;
use crate::error::{Abort, CommError};
use crate::sync;
use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;

/// What the ranks of a group share: a lock around [`State`], and the signal that it has changed.
pub(super) struct GroupState {
    state: Mutex<State>,
    changed: Condvar,
}

pub(super) struct State {
    /// Operations that some ranks have entered and not all have left; at most two.
    pub(super) slots: BTreeMap<u64, Slot>,
    /// Number of operations that each rank has issued.
    pub(super) issued: Vec<u64>,
    /// Why no further operation can start.
    pub(super) failure: Option<Failure>,
    /// A rank whose worker stopped in the middle of an operation.
    pub(super) crashed: Option<usize>,
}

/// Why a group can no longer be used.
pub(super) enum Failure {
    Abort(Abort),
    Error(CommError),
}

impl Failure {
    pub(super) fn error(&self, site: &CallSite) -> CommError {
        match self {
            Failure::Abort(abort) => abort.error(site),
            Failure::Error(error) => error.clone(),
        }
    }
}

impl GroupState {
    pub(super) fn new(world_size: usize) -> GroupState {
        let state =
            State { slots: BTreeMap::new(), issued: vec![0; world_size], failure: None, crashed: None };
        GroupState { state: Mutex::new(state), changed: Condvar::new() }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        sync::lock(&self.state)
    }

    /// Waits for the next [`GroupState::notify`].
    pub(super) fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        sync::wait(&self.changed, state)
    }

    pub(super) fn notify(&self) {
        self.changed.notify_all();
    }

    /// Sleeps for `time`, or until the group fails.
    pub(super) fn sleep(&self, time: Duration) {
        drop(sync::wait_until(&self.changed, self.lock(), time, |state| state.failure.is_some()));
    }

    /// Fails operations that not all ranks have entered. The first cause wins.
    pub(super) fn fail(&self, abort: Abort) {
        self.lock().failure.get_or_insert(Failure::Abort(abort));
        self.notify();
    }
}
