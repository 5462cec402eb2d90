//! Work that is repeated while someone wants its result, and pauses otherwise.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tokio::sync::watch;

/// A thread that does its work on request, with a minimum pause, once for all clients that ask.
#[derive(Debug)]
pub(super) struct Refresher {
    state: Arc<State>,
    /// Number of times the work was done.
    done: watch::Receiver<u64>,
}

#[derive(Debug)]
struct State {
    wishes: Mutex<Wishes>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Wishes {
    is_wanted: bool,
    is_over: bool,
    /// True if the thread has ended by a panic.
    has_failed: bool,
    /// Time when the work was last begun.
    begun: Option<Instant>,
    /// Time when the last completed work was begun: its result is from that moment.
    done: Option<Instant>,
}

impl Wishes {
    fn mark_done(&mut self) {
        self.done = self.begun;
    }
}

impl State {
    fn wishes(&self) -> MutexGuard<'_, Wishes> {
        self.wishes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Records a panic of the thread that holds it.
struct Failure(Arc<State>);

impl Drop for Failure {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.wishes().has_failed = true;
        }
    }
}

impl Refresher {
    /// Starts the thread `name`, which does `work` on request, with at least `pause` between two starts.
    pub(super) fn start(
        name: &str,
        pause: Duration,
        mut work: impl FnMut() + Send + 'static,
    ) -> io::Result<Self> {
        let state = Arc::new(State { wishes: Mutex::default(), changed: Condvar::new() });
        let (sender, done) = watch::channel(0);
        let shared = state.clone();
        thread::Builder::new().name(name.to_owned()).spawn(move || {
            // Dropped before the sender, so that anyone who waits for the sender finds the panic recorded.
            let _failure = Failure(shared.clone());
            while shared.next(pause) {
                work();
                shared.wishes().mark_done();
                sender.send_modify(|times| *times += 1);
            }
        })?;
        Ok(Refresher { state, done })
    }

    /// Requests the work for a client that will come.
    pub(super) fn want(&self) {
        self.state.wishes().is_wanted = true;
        self.state.changed.notify_all();
    }

    /// Waits for a result that is no older than `age`, for at most `patience`.
    pub(super) async fn fresh(&self, age: Duration, patience: Duration) {
        let mut done = self.done.clone();
        {
            let mut wishes = self.state.wishes();
            done.borrow_and_update();
            let is_young = |begun: Option<Instant>| begun.is_some_and(|begun| begun.elapsed() < age);
            if is_young(wishes.done) {
                return;
            }
            let is_under_way = wishes.begun != wishes.done && is_young(wishes.begun);
            wishes.is_wanted |= !is_under_way;
        }
        self.state.changed.notify_all();
        // An error means that the thread is gone: its last result is the only one.
        let _ = tokio::time::timeout(patience, done.changed()).await;
    }

    /// Returns true if the work is no longer done because it has panicked.
    pub(super) fn has_failed(&self) -> bool {
        self.state.wishes().has_failed
    }

    /// Ends the thread, after any work in progress.
    pub(super) fn stop(&self) {
        self.state.wishes().is_over = true;
        self.state.changed.notify_all();
    }
}

impl Drop for Refresher {
    fn drop(&mut self) {
        self.stop();
    }
}

impl State {
    /// Waits until the work must be done. Returns false when the thread should end.
    fn next(&self, pause: Duration) -> bool {
        let mut wishes = self.wishes();
        loop {
            if wishes.is_over {
                return false;
            }
            let rest = wishes.begun.map_or(Duration::ZERO, |begun| pause.saturating_sub(begun.elapsed()));
            wishes = match (wishes.is_wanted, rest.is_zero()) {
                (true, true) => {
                    wishes.is_wanted = false;
                    wishes.begun = Some(Instant::now());
                    return true;
                }
                (true, false) => {
                    self.changed.wait_timeout(wishes, rest).unwrap_or_else(PoisonError::into_inner).0
                }
                (false, _) => self.changed.wait(wishes).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    #[test]
    fn many_who_ask_get_one_result() {
        let times = Arc::new(AtomicU64::new(0));
        let counted = times.clone();
        let work = move || {
            counted.fetch_add(1, Ordering::SeqCst);
        };
        let refresher = Refresher::start("test", Duration::from_millis(1), work).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let long = Duration::from_secs(600);
        runtime.block_on(async {
            for _ in 0..100 {
                refresher.fresh(long, long).await;
            }
            assert_eq!(times.load(Ordering::SeqCst), 1);
            refresher.fresh(Duration::ZERO, long).await;
            assert_eq!(times.load(Ordering::SeqCst), 2);
            refresher.stop();
            let mut done = refresher.done.clone();
            while done.changed().await.is_ok() {}
            // The thread is gone, so no one waits for it.
            refresher.fresh(Duration::ZERO, long).await;
            assert!(!refresher.has_failed());
        });
    }

    #[test]
    fn a_panic_is_noted() {
        let refresher = Refresher::start("test", Duration::ZERO, || panic!("as the test wants")).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let long = Duration::from_secs(600);
        runtime.block_on(refresher.fresh(long, long));
        assert!(refresher.has_failed());
    }
}
