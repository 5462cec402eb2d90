//! Work that is done on request, once for all clients that wait for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::Mutex;
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};

#[derive(Clone)]
pub(super) struct Refresher {
    pause: Duration,
    work: Arc<dyn Fn() + Send + Sync>,
    /// Start of the last completed work. Locked while the work is in progress.
    begun: Arc<Mutex<Option<Instant>>>,
    has_failed: Arc<AtomicBool>,
}

impl Refresher {
    pub(super) fn new(pause: Duration, work: impl Fn() + Send + Sync + 'static) -> Self {
        Refresher { pause, work: Arc::new(work), begun: Arc::default(), has_failed: Arc::default() }
    }

    /// Waits at most `patience` for a result no older than `age`. Work that takes longer continues.
    pub(super) async fn fresh(&self, age: Duration, patience: Duration) {
        let asked = Instant::now();
        let wait = async {
            let mut begun = self.begun.clone().lock_owned().await;
            let is_young = |begun: Instant| begun >= asked || begun.elapsed() < age;
            if self.has_failed() || begun.is_some_and(is_young) {
                return;
            }
            let Refresher { pause, work, has_failed, .. } = self.clone();
            // A separate task, which a disconnecting client does not cancel.
            let task = tokio::spawn(async move {
                sleep(begun.map_or(Duration::ZERO, |begun| pause.saturating_sub(begun.elapsed()))).await;
                let start = Instant::now();
                let done = spawn_blocking(move || {
                    work();
                    *begun = Some(start);
                });
                // After a panic, the last result remains.
                has_failed.fetch_or(done.await.is_err(), Ordering::AcqRel);
            });
            let _ = task.await;
        };
        let _ = timeout(patience, wait).await;
    }

    /// Returns true if the work has panicked; it is not done again.
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
