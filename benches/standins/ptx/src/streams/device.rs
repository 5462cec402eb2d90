//! Streams and events as in a driver, and the threads that execute the operations of streams.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;

use super::state::{Event, Failed, Release, Settings, State, Stream, Submitted, Work};
use super::worker::{Shared, lock};

/// The streams of a process, and their memory. Stream 0 is the default stream.
#[derive(Clone)]
pub struct Device(Arc<Shared>);

impl Device {
    /// Creates a device that calls `tell` for each problem it finds.
    pub fn new(settings: Settings, tell: impl Fn(&str) + Send + Sync + 'static) -> Device {
        let shared = Shared {
            settings,
            state: Mutex::default(),
            changed: Condvar::new(),
            order: Mutex::default(),
            graveyard: Mutex::default(),
            tell: Box::new(tell),
        };
        let device = Device(Arc::new(shared));
        device.create(0, true);
        device
    }

    /// Creates a stream and its thread. Streams that are `blocking` are ordered with the default stream.
    pub fn create(&self, number: usize, blocking: bool) {
        let stream = Stream { blocking, ..Stream::default() };
        lock(&self.0.state).streams.insert(number, stream);
        let shared = self.0.clone();
        let worker = thread::Builder::new().name(format!("stream {number}"));
        if let Err(error) = worker.spawn(move || shared.execute(number)) {
            self.0.fail(&format!("no thread for stream {number}: {error}"));
        }
    }

    /// Ends a stream once it has finished its operations.
    pub fn destroy(&self, number: usize) {
        if let Some(stream) = lock(&self.0.state).streams.get_mut(&number) {
            stream.ends = true;
            stream.turn.notify_one();
        }
    }

    /// Queues an operation on `stream`, and waits for room in the queue.
    pub fn submit(&self, stream: usize, submitted: Submitted) -> Result<(), Failed> {
        self.0.issue(stream, submitted, None).map(drop)
    }

    /// Registers `bytes` bytes at `start` as memory: from the next operation of `stream` on, or immediately.
    pub fn allocated(&self, start: u64, bytes: u64, stream: Option<usize>) -> Result<(), Failed> {
        let what = "allocation".to_owned();
        let operation = match stream {
            Some(stream) => {
                self.0.issue(stream, Submitted { what, accesses: Vec::new(), work: Work::Nothing }, None)?
            }
            None => self.0.by_host(what),
        };
        lock(&self.0.order).allocated(start, bytes, &operation);
        Ok(())
    }

    /// Registers `bytes` bytes at `start` as host memory that copies read when they are executed.
    pub fn pinned(&self, start: u64, bytes: u64) {
        let operation = self.0.by_host("allocation".to_owned());
        lock(&self.0.order).allocated(start, bytes, &operation);
        lock(&self.0.state).pinned.insert(start, start + bytes);
    }

    /// Frees pinned memory immediately.
    pub fn unpinned(&self, start: u64, release: Release) {
        let operation = self.0.by_host("free".to_owned());
        let end = lock(&self.0.state).pinned.remove(&start).unwrap_or(start);
        let freed = lock(&self.0.order).freed(&operation, start);
        self.0.tell(freed.result);
        if freed.written.is_some() {
            self.0.bury(start, end - start, release);
        }
    }

    /// Frees the memory at `start` when `stream` reaches this operation, or when all streams have finished
    /// their current operations.
    pub fn free(&self, start: u64, stream: Option<usize>, release: Release) -> Result<(), Failed> {
        let what = "free".to_owned();
        if let Some(stream) = stream {
            let work = Work::Free(start, release);
            return self.submit(stream, Submitted { what, accesses: Vec::new(), work });
        }
        let result = self.synchronize();
        let operation = self.0.by_host(what);
        self.0.free(&operation, start, release);
        result
    }

    /// Records the operations of `stream` so far.
    pub fn record(&self, stream: usize) -> Event {
        let state = lock(&self.0.state);
        let mark = |of: &Stream| Event { place: Some((stream, of.issued)), clock: of.clock.clone() };
        state.streams.get(&stream).map(mark).unwrap_or_default()
    }

    /// Makes later operations of `stream` wait for `event`. An event that was never recorded is ignored.
    pub fn wait(&self, stream: usize, event: &Event) -> Result<(), Failed> {
        let what = "wait for an event".to_owned();
        let submitted = Submitted { what, accesses: Vec::new(), work: Work::Nothing };
        self.0.issue(stream, submitted, Some(event)).map(drop)
    }

    /// Returns `true` if everything recorded in `event` is done. The host then knows this.
    pub fn query(&self, event: &Event) -> Result<bool, Failed> {
        let mut state = lock(&self.0.state);
        if state.failed {
            return Err(Failed);
        }
        let done = event.place.is_none_or(|place| state.is_done(place));
        if done {
            state.host.join(&event.clock);
        }
        Ok(done)
    }

    /// Waits until `event` is done.
    pub fn wait_on_host(&self, event: &Event) -> Result<(), Failed> {
        let state = lock(&self.0.state);
        let goes_on = |state: &mut State| {
            let done = event.place.is_none_or(|place| state.is_done(place));
            !done && !state.failed
        };
        let mut state = self.0.changed.wait_while(state, goes_on).unwrap_or_else(PoisonError::into_inner);
        state.host.join(&event.clock);
        if state.failed { Err(Failed) } else { Ok(()) }
    }

    /// Waits until all streams have finished their operations.
    pub fn synchronize(&self) -> Result<(), Failed> {
        let streams: Vec<usize> = lock(&self.0.state).streams.keys().copied().collect();
        streams.into_iter().map(|stream| self.wait_on_host(&self.record(stream))).fold(Ok(()), Result::and)
    }

    /// Returns `true` after an error.
    pub fn has_failed(&self) -> bool {
        lock(&self.0.state).failed
    }
}
