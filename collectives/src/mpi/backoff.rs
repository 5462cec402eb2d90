//! Backoff for polling, because MPI gives no notification.

use std::thread;
use std::time::Duration;

const EAGER: u32 = 64;

/// Duration of the first sleep; doubles with each poll.
const SHORTEST: Duration = Duration::from_micros(20);

pub(super) struct Backoff {
    looks: u32,
    limit: Duration,
}

impl Backoff {
    pub(super) fn new(limit: Duration) -> Backoff {
        Backoff { looks: 0, limit }
    }

    pub(super) fn reset(&mut self) {
        self.looks = 0;
    }

    /// Waits until the time has passed or another thread calls [`thread::Thread::unpark`].
    pub(super) fn wait(&mut self) {
        match self.looks.checked_sub(EAGER) {
            None => thread::yield_now(),
            Some(sleeps) => {
                let sleep = SHORTEST.saturating_mul(1 << sleeps.min(16));
                thread::park_timeout(sleep.min(self.limit));
            }
        }
        self.looks = self.looks.saturating_add(1);
    }
}
