//! Queues of operations, and the waits of each operation.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::{Arc, Condvar};

use super::clock::Clock;
use super::operation::{Access, Operation, Use};

/// The work of an operation when it is executed.
pub enum Work {
    Nothing,
    /// A call that accesses the declared bytes.
    Call(Box<dyn FnOnce() -> Result<(), String> + Send>),
    /// A kernel, which reports its accesses afterwards.
    Kernel(Box<dyn FnOnce() -> Ran + Send>),
    /// A host function; the host learns that it is reached before it starts.
    HostFunction(Box<dyn FnOnce() + Send>),
    /// Frees the allocation at this address.
    Free(u64, Release),
}

/// The bytes that a kernel has accessed, and its fault.
pub type Ran = (Vec<Access>, Result<(), String>);

/// Returns an address range to the system.
pub type Release = Box<dyn FnOnce() + Send>;

/// An operation that a stream has not finished.
pub struct Task {
    pub operation: Arc<Operation>,
    /// Operations of other streams that must be done first: stream and count.
    pub after: Vec<(usize, u32)>,
    pub accesses: Vec<Access>,
    /// Memory that the host must not change until the task is done, with its checksum.
    pub sums: Vec<(Access, u64)>,
    /// Taken when the operation starts.
    pub work: Option<Work>,
}

/// The queue of a stream.
#[derive(Default)]
pub struct Stream {
    /// The first task stays until it is done.
    pub tasks: VecDeque<Task>,
    /// Number of operations issued so far, and number of those that are done.
    pub issued: u32,
    pub done: u32,
    /// The operations before the next operation.
    pub clock: Clock,
    /// Set if this stream and the default stream wait for each other.
    pub blocking: bool,
    /// Set if no further operation will be issued.
    pub ends: bool,
    /// The condition on which its thread waits until an operation may start or the stream ends.
    pub turn: Arc<Condvar>,
}

/// The behaviour of streams.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// Seed of the random delays of operations.
    pub seed: u64,
    /// Number of operations that a stream accepts before the host must wait.
    pub queue: usize,
    /// Set if a problem is only reported, without being an error.
    pub goes_on: bool,
}

/// An error after which no other operation is executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failed;

/// A mark in a stream: the operations before it when it was recorded.
#[derive(Debug, Clone, Default)]
pub struct Event {
    pub(super) place: Option<(usize, u32)>,
    pub(super) clock: Clock,
}

/// The work that a stream is given, its name, and the bytes that it accesses.
pub struct Submitted {
    pub what: String,
    pub accesses: Vec<Access>,
    pub(super) work: Work,
}

/// The state of all streams.
#[derive(Default)]
pub struct State {
    pub streams: BTreeMap<usize, Stream>,
    /// The operations that the host knows to be done.
    pub host: Clock,
    /// Number of operations of all streams.
    pub operations: u64,
    /// Set after an error: nothing is executed any more.
    pub failed: bool,
    /// Operations involved in a problem.
    pub told: HashSet<u64>,
    /// Ranges of pinned memory: start and end.
    pub pinned: BTreeMap<u64, u64>,
}

impl State {
    pub fn is_done(&self, (stream, count): (usize, u32)) -> bool {
        self.streams.get(&stream).is_none_or(|stream| stream.done >= count)
    }

    /// Returns `true` if the next operation of `stream` may start.
    pub fn is_ready(&self, stream: usize) -> bool {
        let first = self.streams.get(&stream).and_then(|stream| stream.tasks.front());
        first.is_some_and(|task| task.after.iter().all(|&after| self.is_done(after)))
    }

    /// Wakes the streams whose next operation waited for `stream` and may start now.
    pub fn wake_after(&self, stream: usize) {
        for (&number, other) in &self.streams {
            let waited = |task: &Task| task.after.iter().any(|&(on, _)| on == stream);
            if other.tasks.front().is_some_and(waited) && self.is_ready(number) {
                other.turn.notify_one();
            }
        }
    }

    /// Returns `true` if no stream can proceed before `stream` does.
    pub fn all_wait_for(&self, stream: usize) -> bool {
        let mut stuck = HashSet::from([stream]);
        loop {
            let before = stuck.len();
            for (&number, other) in &self.streams {
                let Some(first) = other.tasks.front() else { continue };
                let waits = |&(on, count): &(usize, u32)| stuck.contains(&on) && !self.is_done((on, count));
                if first.after.iter().any(waits) {
                    stuck.insert(number);
                }
            }
            if stuck.len() == before {
                break;
            }
        }
        self.streams.iter().all(|(number, other)| other.tasks.is_empty() || stuck.contains(number))
    }

    /// Returns the parts of `accesses` that read pinned memory to which no pending operation writes.
    pub fn pinned_reads(&self, accesses: &[Access]) -> Vec<Access> {
        let is_pinned = |access: &Access| {
            let range = self.pinned.range(..=access.start).next_back();
            access.how == Use::Read && range.is_some_and(|(_, &end)| access.end <= end)
        };
        let tasks = || self.streams.values().flat_map(|stream| &stream.tasks);
        let is_written = |access: &Access| {
            let mut others = tasks().flat_map(|task| &task.accesses);
            others
                .any(|other| other.how == Use::Write && other.start < access.end && access.start < other.end)
        };
        accesses.iter().filter(|access| is_pinned(access) && !is_written(access)).copied().collect()
    }
}

impl Submitted {
    /// Creates a copy or another call with declared accesses.
    pub fn call(
        what: impl Into<String>,
        accesses: Vec<Access>,
        call: impl FnOnce() -> Result<(), String> + Send + 'static,
    ) -> Submitted {
        Submitted { what: what.into(), accesses, work: Work::Call(Box::new(call)) }
    }

    /// Creates a launch, which returns its accesses.
    pub fn kernel(what: impl Into<String>, kernel: impl FnOnce() -> Ran + Send + 'static) -> Submitted {
        Submitted { what: what.into(), accesses: Vec::new(), work: Work::Kernel(Box::new(kernel)) }
    }

    /// Creates a host function.
    pub fn host_function(function: impl FnOnce() + Send + 'static) -> Submitted {
        let (what, accesses) = ("host function".to_owned(), Vec::new());
        Submitted { what, accesses, work: Work::HostFunction(Box::new(function)) }
    }
}
