//! Backoff for polling when MPI gives no notification.

use std::thread;
use std::time::Duration;

/// Number of polls that only yield to other threads, before the first sleep.
const EAGER: u32 = 64;

/// Duration of the first sleep; doubles with each poll.
const SHORTEST: Duration = Duration::from_micros(20);

/// A sequence of waits that grow from zero to a limit.
pub(super) struct Backoff {
    looks: u32,
    limit: Duration,
}

impl Backoff {
    pub(super) fn new(limit: Duration) -> Backoff {
        Backoff { looks: 0, limit }
    }

    /// Restarts with the shortest wait, because something has happened.
    pub(super) fn reset(&mut self) {
        self.looks = 0;
    }

    /// Waits; another thread may end the wait with [`thread::Thread::unpark`].
    pub(super) fn wait(&mut self) {
        match self.looks.checked_sub(EAGER) {
            None => thread::yield_now(),
            Some(sleeps) => {
                // Every limit is reached before 16 doublings.
                let sleep = SHORTEST.saturating_mul(1 << sleeps.min(16));
                thread::park_timeout(sleep.min(self.limit));
            }
        }
        self.looks = self.looks.saturating_add(1);
    }
}
