use std::io;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rayon::{ThreadPool, ThreadPoolBuilder};

static POOL: Mutex<Option<&'static ThreadPool>> = Mutex::new(None);

/// Runs `work` in a shared pool with one thread per core, which its parallel parts use. The first call starts it.
///
/// # Errors
///
/// Fails if the system cannot start the threads.
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

/// Repeats work in a thread until it is dropped, which waits for the thread.
#[derive(Debug)]
pub struct Repeat {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Repeat {
    /// Calls `work(false)` after every `pause` in a thread called `name`, and `work(true)` when it is dropped.
    ///
    /// # Errors
    ///
    /// Fails if the system cannot start a thread.
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
            let _ = thread.join();
        }
    }
}
