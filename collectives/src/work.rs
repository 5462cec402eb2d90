use crate::backend::GroupControl;
use crate::buffer::Buffer;
use crate::call::CallSite;
use crate::error::CommError;
use crate::sync::Monitor;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time for the backend to release its buffers after a timeout, which usually takes much less.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(5);

/// Minimum time between two checks of a wait near its limit.
const LEAST_WAIT: Duration = Duration::from_millis(50);

/// An operation in flight, or its result. Dropping it discards the result without cancelling the operation.
#[must_use = "an operation is complete, and its errors are known, only after wait"]
pub struct Work(State);

enum State {
    Ready(Result<Buffer, CommError>),
    /// Queued on a GPU. `join` makes the caller's later GPU work wait for the operation.
    #[cfg(feature = "cuda")]
    Queued {
        result: Buffer,
        join: Box<dyn FnOnce() -> Result<(), CommError> + Send + Sync>,
    },
    Pending(Arc<Pending>),
}

struct Pending {
    site: CallSite,
    control: Arc<dyn GroupControl>,
    result: Monitor<Option<Result<Buffer, CommError>>>,
}

impl Work {
    /// Returns work that is already done.
    pub fn ready(result: Result<Buffer, CommError>) -> Work {
        Work(State::Ready(result))
    }

    /// Returns work that is queued on a GPU. `join` makes later GPU work of the calling thread wait for it.
    #[cfg(feature = "cuda")]
    pub(crate) fn queued(
        result: Buffer,
        join: impl FnOnce() -> Result<(), CommError> + Send + Sync + 'static,
    ) -> Work {
        Work(State::Queued { result, join: Box::new(join) })
    }

    pub(crate) fn pending(site: CallSite, control: Arc<dyn GroupControl>) -> (Work, Completer) {
        let pending = Arc::new(Pending { site, control, result: Monitor::default() });
        (Work(State::Pending(Arc::clone(&pending))), Completer(Some(pending)))
    }

    /// Waits for the operation and returns the buffer that it filled. Afterwards, even after an error, no rank reads
    /// this rank's input. With NCCL, the host does not wait: the guarantee and the result hold for GPU work that the
    /// calling thread queues later.
    /// # Errors
    ///
    /// Any [`CommError`]. [`CommError::TimedOut`] fails the whole group on every rank.
    pub fn wait(self, timeout: Duration) -> Result<Buffer, CommError> {
        match self.0 {
            State::Ready(result) => result,
            #[cfg(feature = "cuda")]
            State::Queued { result, join } => join().map(|()| result),
            State::Pending(pending) => pending.take(timeout).unwrap_or_else(|| {
                let error = pending.control.time_out(&pending.site, timeout);
                let _ = pending.take(RELEASE_TIMEOUT);
                Err(error)
            }),
        }
    }

    /// Returns the call of this work; `None` if [`Work::wait`] does not wait on the host.
    pub fn site(&self) -> Option<&CallSite> {
        match &self.0 {
            State::Pending(pending) => Some(&pending.site),
            _ => None,
        }
    }

    /// Returns whether [`Work::wait`] would return immediately.
    pub fn is_done(&self) -> bool {
        match &self.0 {
            State::Pending(pending) => pending.result.lock().is_some(),
            _ => true,
        }
    }
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work").field("done", &self.is_done()).finish_non_exhaustive()
    }
}

impl Pending {
    /// Returns `None` if there is no result after `timeout`, in which time with a held rank does not count.
    fn take(&self, timeout: Duration) -> Option<Result<Buffer, CommError>> {
        let holds = &self.control.identity().shared.holds;
        let (start, held_before) = (Instant::now(), holds.total());
        let mut left = timeout;
        loop {
            if let Some(result) = self.result.wait_until(self.result.lock(), left, Option::is_some).take() {
                return Some(result);
            }
            let limit = timeout.saturating_add(holds.total() - held_before);
            left = limit.saturating_sub(start.elapsed());
            if left.is_zero() {
                return None;
            }
            // While a rank is held, the remaining time does not decrease.
            left = left.max(LEAST_WAIT);
        }
    }
}

pub(crate) struct Completer(Option<Arc<Pending>>);

impl Completer {
    /// All references to the caller's buffers must have been dropped.
    pub(crate) fn complete(mut self, result: Result<Buffer, CommError>) {
        if let Some(pending) = self.0.take() {
            pending.result.update(|done| *done = Some(result));
        }
    }
}

impl Drop for Completer {
    fn drop(&mut self) {
        if let Some(pending) = self.0.take() {
            let error = pending.control.give_up(&pending.site, "its worker stopped");
            pending.result.update(|done| *done = Some(Err(error)));
        }
    }
}
