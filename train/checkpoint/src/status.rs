//! The progress of the thread that writes a rank's part, and commands to it.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kiln_sys::Meter;

/// Time limit for the parts of the other ranks when the run has failed.
const LAST_WAIT: Duration = Duration::from_secs(1);

/// Maximum time between two messages of ranks that wait for the end of a save.
const BEAT: Duration = Duration::from_secs(5);

/// Time limits with which ranks wait for the writing threads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// Maximum time between two messages, however long the disk takes.
    pub(super) beat: Duration,
    /// Time without progress after which a disk has failed.
    pub(super) timeout: Duration,
}

impl Patience {
    /// Returns the limits for ranks that wait at most `word` for a message from each other, and at most
    /// `timeout` for the disk.
    pub(super) fn new(word: Duration, timeout: Duration) -> Self {
        Patience { beat: BEAT.min(word / 4), timeout }
    }
}

/// The stage of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Its part is being written.
    Writing,
    /// Its part is on the disk.
    Written,
    /// It has no work left.
    Complete,
    /// It could not write its part.
    Failed,
}

/// The next action of a thread that waits for the parts of other ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Look for them again.
    Look,
    /// Report that they have not arrived in time.
    Overdue,
    /// Stop: the save or the run has failed elsewhere.
    GiveUp,
}

/// Shared by a rank and the thread that writes for it.
pub(super) struct Status {
    state: Mutex<State>,
    changed: Condvar,
    meter: Arc<Meter>,
}

struct State {
    stage: Stage,
    /// Time of the thread's last progress.
    moved: Instant,
    /// True while it waits for other ranks to write their parts.
    waiting: bool,
    /// Deadline for the parts of other ranks; unknown until all parts are written.
    due: Option<Instant>,
    /// Deadline for all waiting, if the run has failed.
    end: Option<Instant>,
    cancelled: bool,
}

impl Status {
    /// Creates the status of a thread that begins to write now, and counts the bytes with `meter`.
    pub(super) fn new(meter: Arc<Meter>) -> Self {
        let state = State {
            stage: Stage::Writing,
            moved: Instant::now(),
            waiting: false,
            due: None,
            end: None,
            cancelled: false,
        };
        Status { state: Mutex::new(state), changed: Condvar::new(), meter }
    }

    /// Returns the meter of the written bytes.
    pub(super) fn meter(&self) -> &Meter {
        &self.meter
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

    /// Records the thread's progress; returns false if its work is no longer wanted.
    pub(super) fn get_on(&self) -> bool {
        let mut state = self.state();
        state.moved = Instant::now();
        !state.cancelled
    }

    /// Returns whether the thread has work left and has made no progress for `patience`.
    pub(super) fn is_stalled(&self, patience: Duration) -> bool {
        let state = self.state();
        let busy = matches!(state.stage, Stage::Writing | Stage::Written) && !state.waiting;
        busy && state.moved.elapsed() > patience
    }

    /// Waits until the thread has no work left, for at most `most`.
    pub(super) fn wait(&self, most: Duration) {
        let busy = |state: &mut State| matches!(state.stage, Stage::Writing | Stage::Written);
        drop(self.changed.wait_timeout_while(self.state(), most, busy));
    }

    /// Informs the thread that the parts of all ranks are written: it may take `timeout`, from the first such
    /// call on, until they are visible.
    pub(super) fn all_written(&self, timeout: Duration) {
        let mut state = self.state();
        if state.due.is_none() {
            // A time beyond the range of the clock never comes.
            state.due = Instant::now().checked_add(timeout);
            self.changed.notify_all();
        }
    }

    /// Tells the thread to stop: this checkpoint is no longer wanted.
    pub(super) fn cancel(&self) {
        self.state().cancelled = true;
        self.changed.notify_all();
    }

    /// Tells the thread not to wait for other ranks much longer.
    pub(super) fn hurry(&self) {
        self.state().end = Some(Instant::now() + LAST_WAIT);
        self.changed.notify_all();
    }

    /// Waits for `pause`, or less if the status changes, before the next poll for the parts of other ranks.
    pub(super) fn pause(&self, pause: Duration) -> Next {
        let mut state = self.state();
        let now = Instant::now();
        let passed = |time: Option<Instant>| time.is_some_and(|time| now >= time);
        if state.cancelled || passed(state.end) {
            return Next::GiveUp;
        }
        if passed(state.due) {
            return Next::Overdue;
        }
        state.waiting = true;
        let waited = self.changed.wait_timeout(state, pause);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        (state.waiting, state.moved) = (false, Instant::now());
        Next::Look
    }

    /// Returns a guard that marks the part as failed when it is dropped, unless [`FailOnDrop::forget`] was
    /// called.
    pub(super) fn fail_on_drop(self: &Arc<Self>) -> FailOnDrop {
        FailOnDrop(Some(self.clone()))
    }
}

/// A guard; see [`Status::fail_on_drop`].
pub(super) struct FailOnDrop(Option<Arc<Status>>);

impl FailOnDrop {
    /// Disarms the guard after success.
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
