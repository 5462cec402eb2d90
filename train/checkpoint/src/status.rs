//! How far the thread is that writes a rank's part, and what it is told.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kiln_process::Meter;

/// How long the parts of the other ranks may take when the run has failed.
const LAST_WAIT: Duration = Duration::from_secs(1);

/// Ranks that wait for the end of a save talk to each other at least this often.
const BEAT: Duration = Duration::from_secs(5);

/// How the ranks wait for those that write.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// They talk to each other at least this often, however long the disk takes.
    pub(super) beat: Duration,
    /// A disk that takes nothing for this long has failed.
    pub(super) timeout: Duration,
}

impl Patience {
    /// Of ranks that wait for each other's word no longer than `word`, with a disk no longer than `timeout`.
    pub(super) fn new(word: Duration, timeout: Duration) -> Self {
        Patience { beat: BEAT.min(word / 4), timeout }
    }
}

/// How far a rank is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Its part is being written.
    Writing,
    /// Its part is on the disk.
    Written,
    /// It has nothing left to do.
    Complete,
    /// It could not do its part.
    Failed,
}

/// What a thread does that waits for the parts of other ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// It looks for them again.
    Look,
    /// It says that they have not come in time.
    Overdue,
    /// It stops: the save or the run has failed elsewhere.
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
    /// When the thread last got on with its work.
    moved: Instant,
    /// Whether it has nothing to do until other ranks have done their part.
    waiting: bool,
    /// Until when the parts of other ranks may come; not known before all have been written.
    due: Option<Instant>,
    /// Until when to wait at all, if the run has failed.
    end: Option<Instant>,
    cancelled: bool,
}

impl Status {
    /// Of a thread that begins to write now, and counts the bytes with `meter`.
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

    /// Counts the bytes that are written.
    pub(super) fn meter(&self) -> &Meter {
        &self.meter
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing in it is half-done at any moment.
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

    /// Notes that the thread gets on; false if its work is not wanted any more.
    pub(super) fn get_on(&self) -> bool {
        let mut state = self.state();
        state.moved = Instant::now();
        !state.cancelled
    }

    /// Whether the thread has work left and has not got on with it for `patience`.
    pub(super) fn is_stalled(&self, patience: Duration) -> bool {
        let state = self.state();
        let busy = matches!(state.stage, Stage::Writing | Stage::Written) && !state.waiting;
        busy && state.moved.elapsed() > patience
    }

    /// Waits until the thread has nothing left to do, for `most` at most.
    pub(super) fn wait(&self, most: Duration) {
        let busy = |state: &mut State| matches!(state.stage, Stage::Writing | Stage::Written);
        drop(self.changed.wait_timeout_while(self.state(), most, busy));
    }

    /// Tells the thread that the parts of all ranks are written: they may take `timeout` from the
    /// first time on that this is said.
    pub(super) fn all_written(&self, timeout: Duration) {
        let mut state = self.state();
        if state.due.is_none() {
            // A time beyond what the clock knows never comes.
            state.due = Instant::now().checked_add(timeout);
            self.changed.notify_all();
        }
    }

    /// Tells the thread to stop: nobody wants this checkpoint any more.
    pub(super) fn cancel(&self) {
        self.state().cancelled = true;
        self.changed.notify_all();
    }

    /// Tells the thread not to wait for other ranks much longer.
    pub(super) fn hurry(&self) {
        self.state().end = Some(Instant::now() + LAST_WAIT);
        self.changed.notify_all();
    }

    /// Waits for `pause` before the next look at what other ranks have written, or less when there is news.
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

    /// Marks the part as failed unless it is told to forget that.
    pub(super) fn fail_on_drop(self: &Arc<Self>) -> FailOnDrop {
        FailOnDrop(Some(self.clone()))
    }
}

/// See [`Status::fail_on_drop`].
pub(super) struct FailOnDrop(Option<Arc<Status>>);

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
