//! Threads for work outside of ranks.

use std::io;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rayon::{ThreadPool, ThreadPoolBuilder};

static POOL: Mutex<Option<&'static ThreadPool>> = Mutex::new(None);

/// Runs `work`, such as reading many files, on one thread per core: its parallel parts use them. The threads are
/// started by the first call. Without this, such work panics if the system starts no more threads.
///
/// # Errors
///
/// If the system cannot start them.
pub fn in_pool<T: Send>(work: impl FnOnce() -> T + Send) -> io::Result<T> {
    let pool = {
        let mut pool = POOL.lock().unwrap_or_else(PoisonError::into_inner);
        match *pool {
            Some(pool) => pool,
            None => {
                let threads = ThreadPoolBuilder::new().thread_name(|index| format!("kiln-{index}"));
                let built = threads.build().map_err(io::Error::other)?;
                *pool.insert(Box::leak(Box::new(built)))
            }
        }
    };
    Ok(pool.install(work))
}

/// Repeats work in a separate thread until it is dropped; dropping waits for the thread.
#[derive(Debug)]
pub struct Repeat {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Repeat {
    /// Runs `work` after every `pause`, in the thread `name`, and once at the end, with `true` as its
    /// argument.
    ///
    /// # Errors
    ///
    /// If the system cannot start a thread.
    pub fn every(
        pause: Duration,
        name: &str,
        mut work: impl FnMut(bool) + Send + 'static,
    ) -> io::Result<Self> {
        let (stop, stopped) = mpsc::channel::<()>();
        let run = move || {
            while stopped.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                work(false);
            }
            work(true);
        };
        let thread = thread::Builder::new().name(name.to_owned()).spawn(run)?;
        Ok(Repeat { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Repeat {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // Its work is done, however the thread has ended.
            let _ = thread.join();
        }
    }
}
