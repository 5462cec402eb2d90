//! Locking.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex whose data stays valid when a thread panics while holding it: every critical section in this
/// crate leaves its state consistent between statements.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
