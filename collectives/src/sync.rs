//! Locking that survives a panic of another thread.
//!
//! Every critical section of this crate leaves its data consistent at each step, so the guard of a poisoned
//! mutex can be used. The panic itself is reported where it happened.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Locks `mutex`, also if a thread panicked while holding it.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for a notification of `condvar`.
pub(crate) fn wait<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condvar.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

/// Waits until `done` holds or `timeout` has passed, and returns the guard either way.
///
/// A timeout beyond what the clock can express means no limit.
pub(crate) fn wait_until<'a, T>(
    condvar: &Condvar,
    mut guard: MutexGuard<'a, T>,
    timeout: Duration,
    mut done: impl FnMut(&T) -> bool,
) -> MutexGuard<'a, T> {
    let deadline = Instant::now().checked_add(timeout);
    while !done(&guard) {
        guard = match deadline {
            None => wait(condvar, guard),
            Some(deadline) => {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                let (guard, _) = condvar.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner);
                guard
            }
        };
    }
    guard
}
