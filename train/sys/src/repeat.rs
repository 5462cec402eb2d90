//! Periodic work in the background of a process.

use std::io;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

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
