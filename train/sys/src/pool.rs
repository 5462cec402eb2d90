//! Threads for work outside of ranks, such as reading many files: one per core, started when needed.

use std::io;
use std::sync::{Mutex, PoisonError};

use rayon::{ThreadPool, ThreadPoolBuilder};

static POOL: Mutex<Option<&'static ThreadPool>> = Mutex::new(None);

/// Runs `work` on these threads: its parallel parts use them. Without this, such work panics if the system
/// starts no more threads.
///
/// # Errors
///
/// If the system cannot start them.
pub fn in_pool<T: Send>(work: impl FnOnce() -> T + Send) -> io::Result<T> {
    Ok(pool()?.install(work))
}

fn pool() -> io::Result<&'static ThreadPool> {
    let mut pool = POOL.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(pool) = *pool {
        return Ok(pool);
    }
    let name = |index| format!("kiln-{index}");
    let built = ThreadPoolBuilder::new().thread_name(name).build().map_err(io::Error::other)?;
    Ok(pool.insert(Box::leak(Box::new(built))))
}
