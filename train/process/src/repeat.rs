//! Work that is done again and again beside the work of a process.

use std::io;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Does something again and again in a thread of its own, until this is dropped, which waits for the thread.
#[derive(Debug)]
pub struct Repeat {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Repeat {
    /// Does `work` after every `pause`, in the thread `name`, and once at the end, which it is told.
    ///
    /// # Errors
    ///
    /// The system's reason not to start a thread.
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
            // What it has done is done, however it has ended.
            let _ = thread.join();
        }
    }
}
