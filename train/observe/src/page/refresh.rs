//! Work that is done while someone wants its result, once for all who ask.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::Mutex;
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};

/// Work that refreshes a result on request, with a minimum pause between two starts.
#[derive(Clone)]
pub(super) struct Refresher {
    pause: Duration,
    work: Arc<dyn Fn() + Send + Sync>,
    /// Start of the last completed work: its result is from that moment. Locked while the work is in progress.
    begun: Arc<Mutex<Option<Instant>>>,
    has_failed: Arc<AtomicBool>,
}

impl Refresher {
    /// Creates a refresher that does `work` with at least `pause` between two starts.
    pub(super) fn new(pause: Duration, work: impl Fn() + Send + Sync + 'static) -> Self {
        Refresher { pause, work: Arc::new(work), begun: Arc::default(), has_failed: Arc::default() }
    }

    /// Waits for a result that is no older than `age`, for at most `patience`. Work that takes longer continues.
    pub(super) async fn fresh(&self, age: Duration, patience: Duration) {
        let asked = Instant::now();
        let wait = async {
            let mut begun = self.begun.clone().lock_owned().await;
            let is_young = |begun: Instant| begun >= asked || begun.elapsed() < age;
            if self.has_failed() || begun.is_some_and(is_young) {
                return;
            }
            let Refresher { pause, work, has_failed, .. } = self.clone();
            // A separate task, which impatient clients do not cancel.
            let task = tokio::spawn(async move {
                sleep(begun.map_or(Duration::ZERO, |begun| pause.saturating_sub(begun.elapsed()))).await;
                let start = Instant::now();
                let done = spawn_blocking(move || {
                    work();
                    *begun = Some(start);
                });
                // After a panic, the last result is the only one.
                has_failed.fetch_or(done.await.is_err(), Ordering::AcqRel);
            });
            let _ = task.await;
        };
        let _ = timeout(patience, wait).await;
    }

    /// Returns true if the work is no longer done because it has panicked.
    pub(super) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    fn block_on(work: impl Future<Output = ()>) {
        tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(work);
    }

    #[test]
    fn many_clients_share_a_result() {
        let times = Arc::new(AtomicU64::new(0));
        let counted = times.clone();
        let work = move || {
            counted.fetch_add(1, Ordering::SeqCst);
        };
        let refresher = Refresher::new(Duration::from_millis(1), work);
        let long = Duration::from_secs(600);
        block_on(async {
            for _ in 0..100 {
                refresher.fresh(long, long).await;
            }
            assert_eq!(times.load(Ordering::SeqCst), 1);
            refresher.fresh(Duration::ZERO, long).await;
            assert_eq!(times.load(Ordering::SeqCst), 2);
            assert!(!refresher.has_failed());
        });
    }

    #[test]
    fn panic_is_noted() {
        let refresher = Refresher::new(Duration::ZERO, || panic!("as the test wants"));
        let long = Duration::from_secs(600);
        block_on(async {
            refresher.fresh(long, long).await;
            assert!(refresher.has_failed());
            refresher.fresh(Duration::ZERO, long).await;
        });
    }
}
