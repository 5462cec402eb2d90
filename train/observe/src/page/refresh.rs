//! Work that is done again and again while somebody wants its result, and rests while nobody does.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tokio::sync::watch;

/// A thread that does its work on request, at most once in a while for all who ask.
#[derive(Debug)]
pub(super) struct Refresher {
    state: Arc<State>,
    /// Times that the work was done.
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
    /// Whether the thread has ended by a panic.
    has_failed: bool,
    /// When the work was begun last.
    begun: Option<Instant>,
    /// When the work was begun that was done last: its result is of then.
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

/// Notes a panic of the thread that holds it.
struct Failure(Arc<State>);

impl Drop for Failure {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.wishes().has_failed = true;
        }
    }
}

impl Refresher {
    /// Starts the thread `name`, which does `work` when it is wanted, with `pause` between two beginnings.
    pub(super) fn start(
        name: &str,
        pause: Duration,
        mut work: impl FnMut() + Send + 'static,
    ) -> io::Result<Self> {
        let state = Arc::new(State { wishes: Mutex::default(), changed: Condvar::new() });
        let (sender, done) = watch::channel(0);
        let shared = state.clone();
        thread::Builder::new().name(name.to_owned()).spawn(move || {
            // Gone before the sender, so that whoever waits for that finds it noted.
            let _failure = Failure(shared.clone());
            while shared.next(pause) {
                work();
                shared.wishes().mark_done();
                sender.send_modify(|times| *times += 1);
            }
        })?;
        Ok(Refresher { state, done })
    }

    /// Lets the work be done, for a client that will come.
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
        // An error says that the thread is gone: what it did last is all there is.
        let _ = tokio::time::timeout(patience, done.changed()).await;
    }

    /// Whether the work is done no more, because it has panicked.
    pub(super) fn has_failed(&self) -> bool {
        self.state.wishes().has_failed
    }

    /// Lets the thread end, after the work that it may be doing.
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
    /// Waits until the work is to be done. Returns whether it is.
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
            // Nobody is there any more who could do it, and nobody waits for that.
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
