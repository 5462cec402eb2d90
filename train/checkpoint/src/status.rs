//! The progress of the thread that writes a rank's part, and commands to that thread.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kiln_sys::Meter;

use super::{CheckpointError, Result};

/// How long a thread waits for the parts of other ranks once the run has failed.
const LAST_WAIT: Duration = Duration::from_secs(1);

/// The stage of a rank's save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The rank's part is being written.
    Writing,
    /// The rank's part is on the disk.
    Written,
    /// The rank has no work left.
    Complete,
    /// The rank could not write its part.
    Failed,
}

/// The next action of a thread that waits for the parts of other ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Look for the parts again.
    Look,
    /// Report that the parts have not arrived in time.
    Overdue,
    /// Stop: the save has failed on another rank, or the run has failed.
    GiveUp,
}

/// The state that a rank shares with the thread that writes for it.
pub(super) struct Status {
    state: Mutex<State>,
    changed: Condvar,
    /// Counts the written bytes.
    pub(super) meter: Arc<Meter>,
}

struct State {
    stage: Stage,
    /// Time of the thread's last progress.
    moved: Instant,
    /// True once the thread was found to hang.
    stalled: bool,
    /// True while the thread waits for other ranks to write their parts.
    waiting: bool,
    /// Deadline for the parts of other ranks; `None` until all parts are written.
    deadline: Option<Instant>,
    /// True if the run has failed.
    hurried: bool,
    cancelled: bool,
}

impl State {
    fn is_busy(&self) -> bool {
        matches!(self.stage, Stage::Writing | Stage::Written)
    }
}

impl Status {
    /// Creates the status of a thread that begins to write now. `meter` counts the bytes written.
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

    /// Records that the thread has made progress; fails if the thread's work is no longer wanted.
    pub(super) fn record_progress(&self) -> Result<()> {
        let mut state = self.state();
        state.moved = Instant::now();
        if state.cancelled { Err(CheckpointError::OtherRank) } else { Ok(()) }
    }

    /// Returns whether the thread has ever made no progress for `timeout` while it had work left.
    pub(super) fn is_stalled(&self, timeout: Duration) -> bool {
        let mut state = self.state();
        state.stalled |= state.is_busy() && !state.waiting && state.moved.elapsed() > timeout;
        state.stalled
    }

    /// Waits until the thread has no work left, but at most `most`.
    pub(super) fn wait(&self, most: Duration) {
        drop(self.changed.wait_timeout_while(self.state(), most, |state| state.is_busy()));
    }

    /// Informs the thread that all ranks have written their parts. The thread fails if the parts are not
    /// visible `timeout` after the first such call.
    pub(super) fn all_written(&self, timeout: Duration) {
        let mut state = self.state();
        if state.deadline.is_none() {
            // A deadline beyond the range of the clock never passes.
            state.deadline = Instant::now().checked_add(timeout);
            self.changed.notify_all();
        }
    }

    /// Stops the thread the next time it records progress: its checkpoint is no longer wanted.
    pub(super) fn cancel(&self) {
        self.state().cancelled = true;
        self.changed.notify_all();
    }

    /// Limits the thread's wait for other ranks to a short time.
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
