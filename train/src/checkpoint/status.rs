//! How far the thread is that writes a rank's part, and what it is told.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Between two looks at whether the other ranks have written their parts.
const PAUSE: Duration = Duration::from_millis(10);

/// How long the parts of the other ranks may take when the run has failed.
const LAST_WAIT: Duration = Duration::from_secs(1);

/// How far a rank is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Stage {
    /// Its part is being written.
    #[default]
    Writing,
    /// Its part is on the disk.
    Written,
    /// It has nothing left to do.
    Complete,
    /// It could not do its part.
    Failed,
}

/// Shared by a rank and the thread that writes for it.
#[derive(Default)]
pub(super) struct Status {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    stage: Stage,
    /// When to stop waiting for other ranks.
    until: Option<Instant>,
}

impl Status {
    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing in it is half-done at any moment.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn stage(&self) -> Stage {
        self.state().stage
    }

    pub(super) fn set(&self, stage: Stage) {
        self.state().stage = stage;
        self.changed.notify_all();
    }

    /// Waits until this rank's part is written; false if it could not be.
    pub(super) fn wait_for_part(&self) -> bool {
        let writing = |state: &mut State| state.stage == Stage::Writing;
        let state = self.changed.wait_while(self.state(), writing);
        state.unwrap_or_else(PoisonError::into_inner).stage != Stage::Failed
    }

    /// Tells the thread not to wait for other ranks any more.
    pub(super) fn cancel(&self) {
        self.state().until = Some(Instant::now());
        self.changed.notify_all();
    }

    /// Tells the thread not to wait for other ranks much longer.
    pub(super) fn hurry(&self) {
        self.state().until = Some(Instant::now() + LAST_WAIT);
        self.changed.notify_all();
    }

    /// Waits a moment; false when there is no more time to wait.
    pub(super) fn pause(&self) -> bool {
        let state = self.state();
        if state.until.is_some_and(|until| Instant::now() >= until) {
            return false;
        }
        // Early when told something; then it looks again.
        drop(self.changed.wait_timeout(state, PAUSE));
        true
    }

    /// Marks the part as failed unless it is told to forget that.
    pub(super) fn fail_on_drop(self: &std::sync::Arc<Self>) -> FailOnDrop {
        FailOnDrop(Some(self.clone()))
    }
}

/// See [`Status::fail_on_drop`].
pub(super) struct FailOnDrop(Option<std::sync::Arc<Status>>);

impl FailOnDrop {
    /// All went well.
    pub(super) fn forget(mut self) {
        self.0 = None;
    }
}

impl Drop for FailOnDrop {
    fn drop(&mut self) {
        if let Some(status) = &self.0 {
            status.set(Stage::Failed);
        }
    }
}
