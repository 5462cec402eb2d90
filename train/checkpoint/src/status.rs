//! Shares the progress of a rank's writer thread, and commands to this thread.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kiln_sys::Meter;

use super::{CheckpointError, Result};

/// Time that a writer thread waits for the parts of other ranks once the run has failed.
const LAST_WAIT: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Writing,
    /// The rank's part is on disk.
    Written,
    Complete,
    Failed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    Look,
    /// The parts have not become visible in time.
    Overdue,
    /// The save has failed on another rank, or the run has failed.
    GiveUp,
}

pub(super) struct Status {
    state: Mutex<State>,
    changed: Condvar,
    pub(super) meter: Arc<Meter>,
}

struct State {
    stage: Stage,
    moved: Instant,
    /// True once the thread was found to hang.
    stalled: bool,
    waiting: bool,
    /// Deadline for the parts of other ranks; `None` until all parts are written.
    deadline: Option<Instant>,
    hurried: bool,
    cancelled: bool,
}

impl State {
    fn is_busy(&self) -> bool {
        matches!(self.stage, Stage::Writing | Stage::Written)
    }
}

impl Status {
    pub(super) fn new(meter: Arc<Meter>) -> Self {
        let state = State {
            stage: Stage::Writing,
            moved: Instant::now(),
            stalled: false,
            waiting: false,
            deadline: None,
            hurried: false,
            cancelled: false,
        };
        Status { state: Mutex::new(state), changed: Condvar::new(), meter }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // The state is consistent at every moment, so it is valid after a panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn stage(&self) -> Stage {
        self.state().stage
    }

    pub(super) fn set(&self, stage: Stage) {
        let mut state = self.state();
        (state.stage, state.moved) = (stage, Instant::now());
        self.changed.notify_all();
    }

    /// Records that the thread has made progress. Fails if the save was cancelled.
    pub(super) fn record_progress(&self) -> Result<()> {
        let mut state = self.state();
        state.moved = Instant::now();
        if state.cancelled { Err(CheckpointError::OtherRank) } else { Ok(()) }
    }

    /// Reports whether the thread has ever been stuck for `timeout` while it had work left.
    pub(super) fn is_stalled(&self, timeout: Duration) -> bool {
        let mut state = self.state();
        state.stalled |= state.is_busy() && !state.waiting && state.moved.elapsed() > timeout;
        state.stalled
    }

    pub(super) fn wait(&self, most: Duration) {
        drop(self.changed.wait_timeout_while(self.state(), most, |state| state.is_busy()));
    }

    /// Starts the `timeout` within which the parts of all ranks must be visible. Later calls do nothing.
    pub(super) fn all_written(&self, timeout: Duration) {
        let mut state = self.state();
        if state.deadline.is_none() {
            // A deadline beyond the range of the clock never passes.
            state.deadline = Instant::now().checked_add(timeout);
            self.changed.notify_all();
        }
    }

    /// Cancels the save: the thread stops the next time it records progress.
    pub(super) fn cancel(&self) {
        self.state().cancelled = true;
        self.changed.notify_all();
    }

    /// Limits the thread's wait for other ranks to [`LAST_WAIT`].
    pub(super) fn hurry(&self) {
        let mut state = self.state();
        (state.deadline, state.hurried) = (Some(Instant::now() + LAST_WAIT), true);
        self.changed.notify_all();
    }

    /// Waits for `pause`, or until the status changes, before the next check for the parts of other ranks.
    pub(super) fn pause(&self, pause: Duration) -> Next {
        let mut state = self.state();
        let is_late = state.deadline.is_some_and(|deadline| Instant::now() >= deadline);
        if state.cancelled || (is_late && state.hurried) {
            return Next::GiveUp;
        }
        if is_late {
            return Next::Overdue;
        }
        state.waiting = true;
        let waited = self.changed.wait_timeout(state, pause);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        (state.waiting, state.moved) = (false, Instant::now());
        Next::Look
    }
}
