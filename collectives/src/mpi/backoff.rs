//! How long to wait between two looks at something that MPI does not notify us of.

use std::thread;
use std::time::Duration;

/// Looks that only let other threads run, before the first sleep.
const EAGER: u32 = 64;

/// First sleep; doubles from look to look.
const SHORTEST: Duration = Duration::from_micros(20);

/// Waits that grow from nothing to a limit.
pub(super) struct Backoff {
    looks: u32,
    limit: Duration,
}

impl Backoff {
    pub(super) fn new(limit: Duration) -> Backoff {
        Backoff { looks: 0, limit }
    }

    /// Starts over, because something has happened.
    pub(super) fn reset(&mut self) {
        self.looks = 0;
    }

    /// Waits; another thread may end the wait with [`thread::Thread::unpark`].
    pub(super) fn wait(&mut self) {
        match self.looks.checked_sub(EAGER) {
            None => thread::yield_now(),
            Some(sleeps) => {
                // Doubling beyond 2^16 times the shortest makes no difference to any limit.
                let sleep = SHORTEST.saturating_mul(1 << sleeps.min(16));
                thread::park_timeout(sleep.min(self.limit));
            }
        }
        self.looks = self.looks.saturating_add(1);
    }
}
