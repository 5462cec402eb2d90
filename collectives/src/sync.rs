//! Helpers for threads and locks. Poisoned locks are used, because every critical section keeps its data consistent.

use std::io;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    thread::Builder::new().name(name.to_owned()).spawn(run)
}

#[derive(Debug, Default)]
pub(crate) struct Monitor<T> {
    data: Mutex<T>,
    changed: Condvar,
}

impl<T> Monitor<T> {
    pub(crate) fn new(data: T) -> Monitor<T> {
        Monitor { data: Mutex::new(data), changed: Condvar::new() }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        lock(&self.data)
    }

    pub(crate) fn update<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let result = change(&mut self.lock());
        self.notify();
        result
    }

    pub(crate) fn notify(&self) {
        self.changed.notify_all();
    }

    pub(crate) fn wait<'a>(&self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        self.changed.wait(guard).unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `done` returns true or `timeout` has passed; returns the guard in both cases. A timeout too long for
    /// the clock means no limit.
    pub(crate) fn wait_until<'a>(
        &self,
        mut guard: MutexGuard<'a, T>,
        timeout: Duration,
        mut done: impl FnMut(&T) -> bool,
    ) -> MutexGuard<'a, T> {
        let deadline = Instant::now().checked_add(timeout);
        while !done(&guard) {
            let left = deadline.map_or(Duration::MAX, |end| end.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                break;
            }
            guard = self.changed.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        guard
    }
}
