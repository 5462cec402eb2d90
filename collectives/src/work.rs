//! The handle of an operation in flight.

use crate::buffer::Buffer;
use crate::error::CommError;
use crate::sync::{lock, wait_until};
use std::fmt;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// How long a timed-out wait gives the backend to release its buffers.
///
/// The backend stops as soon as it learns of the timeout, so it rarely needs that long.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(5);

/// Fails the group because a wait timed out, and returns the error. Takes the time limit.
type OnTimeout = Box<dyn FnOnce(Duration) -> CommError + Send + Sync>;

/// An operation in flight, or its result.
///
/// Dropping it does not cancel the operation; it only discards the result.
#[must_use = "an operation is complete, and its errors are known, only after wait"]
pub struct Work {
    state: State,
}

enum State {
    Ready(Result<Buffer, CommError>),
    /// Queued on a GPU. Only `join` is left to do: it queues the caller's later work behind the operation.
    #[cfg(feature = "cuda")]
    Queued {
        result: Buffer,
        join: Box<dyn FnOnce() -> Result<(), CommError> + Send + Sync>,
    },
    Pending {
        completion: Arc<Completion>,
        on_timeout: OnTimeout,
    },
}

impl Work {
    /// Work that is already done.
    pub fn ready(result: Result<Buffer, CommError>) -> Work {
        Work { state: State::Ready(result) }
    }

    /// Work that is queued on a GPU. `join` makes GPU work that the calling thread queues later wait for it.
    #[cfg(feature = "cuda")]
    pub(crate) fn queued(
        result: Buffer,
        join: impl FnOnce() -> Result<(), CommError> + Send + Sync + 'static,
    ) -> Work {
        Work { state: State::Queued { result, join: Box::new(join) } }
    }

    /// Work that `Completer::complete` finishes.
    pub(crate) fn pending(
        abandoned: impl FnOnce() -> CommError + Send + 'static,
        on_timeout: impl FnOnce(Duration) -> CommError + Send + Sync + 'static,
    ) -> (Work, Completer) {
        let completion = Arc::new(Completion::default());
        let completer =
            Completer { completion: Arc::clone(&completion), abandoned: Some(Box::new(abandoned)) };
        let state = State::Pending { completion, on_timeout: Box::new(on_timeout) };
        (Work { state }, completer)
    }

    /// Waits for the operation and returns the buffer it filled.
    ///
    /// Once this returns, on success or not, no rank reads this rank's input any more. With NCCL, nothing
    /// waits on the host: there this holds for GPU work that the calling thread queues afterwards, and so
    /// does the result.
    ///
    /// # Errors
    ///
    /// Any [`CommError`]. [`CommError::TimedOut`] fails the whole group on every rank, because nobody can
    /// know what the missing ranks would still do.
    pub fn wait(self, timeout: Duration) -> Result<Buffer, CommError> {
        match self.state {
            State::Ready(result) => result,
            #[cfg(feature = "cuda")]
            State::Queued { result, join } => join().map(|()| result),
            State::Pending { completion, on_timeout } => {
                completion.take(timeout).unwrap_or_else(|| {
                    let error = on_timeout(timeout);
                    // The result no longer counts, but the input must be released before return.
                    let _ = completion.take(RELEASE_TIMEOUT);
                    Err(error)
                })
            }
        }
    }

    /// Whether [`Work::wait`] would return at once.
    pub fn is_done(&self) -> bool {
        match &self.state {
            State::Ready(_) => true,
            #[cfg(feature = "cuda")]
            State::Queued { .. } => true,
            State::Pending { completion, .. } => lock(&completion.result).is_some(),
        }
    }
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work").field("done", &self.is_done()).finish_non_exhaustive()
    }
}

/// Where a worker leaves the result.
#[derive(Default)]
struct Completion {
    result: Mutex<Option<Result<Buffer, CommError>>>,
    done: Condvar,
}

impl Completion {
    fn take(&self, timeout: Duration) -> Option<Result<Buffer, CommError>> {
        let result = lock(&self.result);
        wait_until(&self.done, result, timeout, Option::is_some).take()
    }

    fn set(&self, result: Result<Buffer, CommError>) {
        *lock(&self.result) = Some(result);
        self.done.notify_all();
    }
}

/// Completes a [`Work`]. If it is dropped before, the work fails, so that nobody waits for ever.
pub(crate) struct Completer {
    completion: Arc<Completion>,
    abandoned: Option<Box<dyn FnOnce() -> CommError + Send>>,
}

impl Completer {
    /// Hands over the result. All references to the caller's buffers must have been dropped by now.
    pub(crate) fn complete(mut self, result: Result<Buffer, CommError>) {
        self.abandoned = None;
        self.completion.set(result);
    }
}

impl Drop for Completer {
    fn drop(&mut self) {
        if let Some(abandoned) = self.abandoned.take() {
            self.completion.set(Err(abandoned()));
        }
    }
}
