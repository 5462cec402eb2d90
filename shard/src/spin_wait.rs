//! Compute threads that stay awake between the kernels of a pass.
//!
//! A step on a CPU is thousands of short parallel loops with a little serial work between them. A thread of a rayon
//! pool goes to sleep after about ten microseconds without work, and waking it takes longer than many of these gaps.
//! So the other threads of a rank's pool poll for work while parameter groups are being used, as OpenMP's threads do;
//! soon after the last use, they sleep as usual.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Time for which a thread polls for work before it sleeps.
const PATIENCE: Duration = Duration::from_millis(2);
/// Number of pause instructions between two polls: less than a microsecond, and leaves the core to a sibling thread.
const PAUSES: usize = 16;

/// The polling threads of one rank's pool.
#[derive(Default)]
pub(crate) struct SpinWait {
    watching: Arc<[Watch]>,
}

#[derive(Default)]
struct Watch(AtomicBool);

impl SpinWait {
    /// Creates the state for the calling thread's pool.
    pub(crate) fn new() -> Self {
        let threads = rayon::current_num_threads();
        SpinWait { watching: (0..threads).map(|_| Watch::default()).collect() }
    }

    /// Makes the other threads of the pool poll for work, unless they already do. Must be called by the thread that
    /// submits the work, between two parallel loops.
    pub(crate) fn keep(&self) {
        let Some(caller) = rayon::current_thread_index() else { return };
        let watches = |(thread, watch): (usize, &Watch)| thread == caller || watch.is_on();
        if self.watching.iter().enumerate().all(watches) {
            return;
        }
        let watching = Arc::clone(&self.watching);
        rayon::spawn_broadcast(move |context| match watching.get(context.index()) {
            Some(watch) if context.index() != caller => watch.run(),
            _ => {}
        });
    }
}

impl Watch {
    fn is_on(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Runs available work, until there has been none for [`PATIENCE`].
    fn run(&self) {
        if self.0.swap(true, Ordering::Relaxed) {
            return;
        }
        let mut last_work = Instant::now();
        while last_work.elapsed() < PATIENCE {
            if rayon::yield_now() == Some(rayon::Yield::Executed) {
                last_work = Instant::now();
                continue;
            }
            for _ in 0..PAUSES {
                std::hint::spin_loop();
            }
            std::thread::yield_now();
        }
        self.0.store(false, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use kiln_testkit::wait_until;

    use super::*;

    #[test]
    fn watching_threads_do_what_comes_and_then_sleep() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        pool.install(|| {
            let spin_wait = SpinWait::new();
            for _ in 0..2 {
                spin_wait.keep();
                spin_wait.keep();
                // Polling threads run both: this thread only waits here.
                let (done, results) = mpsc::channel();
                for i in 0..2 {
                    let done = done.clone();
                    rayon::spawn(move || done.send(i).unwrap());
                }
                let mut seen: Vec<i32> = results.iter().take(2).collect();
                seen.sort_unstable();
                assert_eq!(seen, [0, 1]);
                // Needs no fixed sleep, because the threads stop by themselves, however long it takes.
                wait_until("the end of the watch", || !spin_wait.watching.iter().any(Watch::is_on));
            }
        });
    }

    #[test]
    fn a_thread_alone_has_nobody_to_keep_awake() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        pool.install(|| {
            let spin_wait = SpinWait::new();
            spin_wait.keep();
            assert!(!spin_wait.watching.iter().any(Watch::is_on));
        });
        SpinWait::new().keep();
    }
}
