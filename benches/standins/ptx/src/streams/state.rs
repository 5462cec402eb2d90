//! Queues of operations, and what each of them waits for.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::{Arc, Condvar};

use super::clock::Clock;
use super::operation::{Access, Operation, Use};

/// What an operation does when its turn has come.
pub enum Work {
    Nothing,
    /// What uses the bytes that were declared.
    Call(Box<dyn FnOnce() -> Result<(), String> + Send>),
    /// What tells afterwards which bytes it has used.
    Kernel(Box<dyn FnOnce() -> Ran + Send>),
    /// What the host learns of before it begins.
    HostFunction(Box<dyn FnOnce() + Send>),
    /// Frees the allocation at this address.
    Free(u64, Release),
}

/// The bytes that a kernel has used, and its fault.
pub type Ran = (Vec<Access>, Result<(), String>);

/// Gives an address range back to the system.
pub type Release = Box<dyn FnOnce() + Send>;

/// An operation that a stream has not finished.
pub struct Task {
    pub operation: Arc<Operation>,
    /// Operations of other streams that have to be done before: stream and count.
    pub after: Vec<(usize, u32)>,
    pub accesses: Vec<Access>,
    /// What the host must not change until then, with its checksum.
    pub sums: Vec<(Access, u64)>,
    /// Taken when it is begun.
    pub work: Option<Work>,
}

/// The queue of a stream.
#[derive(Default)]
pub struct Stream {
    /// The first one stays until it is done.
    pub tasks: VecDeque<Task>,
    /// Operations so far, and those of them that are done.
    pub issued: u32,
    pub done: u32,
    /// What comes before the next operation.
    pub clock: Clock,
    /// Whether it waits for the default stream, and that one for it.
    pub blocking: bool,
    /// No operation will come any more.
    pub ends: bool,
    /// What its thread waits on until an operation may begin, or the stream ends.
    pub turn: Arc<Condvar>,
}

/// How streams behave.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// From which the delays of operations follow.
    pub seed: u64,
    /// Operations that a stream takes before the host has to wait.
    pub queue: usize,
    /// Whether a problem is only told, and not an error as well.
    pub goes_on: bool,
}

/// An operation went wrong, so that no other one will be executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failed;

/// A mark in a stream: what it stands for when it is recorded.
#[derive(Debug, Clone, Default)]
pub struct Event {
    pub(super) place: Option<(usize, u32)>,
    pub(super) clock: Clock,
}

/// What a stream is given to do, under which name, and which bytes it uses.
pub struct Submitted {
    pub what: String,
    pub accesses: Vec<Access>,
    pub(super) work: Work,
}

/// All streams.
#[derive(Default)]
pub struct State {
    pub streams: BTreeMap<usize, Stream>,
    /// What the host knows to be done.
    pub host: Clock,
    /// Operations of all streams.
    pub operations: u64,
    /// Whether something went wrong, after which nothing is executed.
    pub failed: bool,
    /// Operations that took part in a problem.
    pub told: HashSet<u64>,
    /// Ranges of pinned memory: start and end.
    pub pinned: BTreeMap<u64, u64>,
}

impl State {
    pub fn is_done(&self, (stream, count): (usize, u32)) -> bool {
        self.streams.get(&stream).is_none_or(|stream| stream.done >= count)
    }

    /// Whether the next operation of `stream` may begin.
    pub fn is_ready(&self, stream: usize) -> bool {
        let first = self.streams.get(&stream).and_then(|stream| stream.tasks.front());
        first.is_some_and(|task| task.after.iter().all(|&after| self.is_done(after)))
    }

    /// Wakes the streams whose next operation waited for `stream` and may begin now.
    pub fn wake_after(&self, stream: usize) {
        for (&number, other) in &self.streams {
            let waited = |task: &Task| task.after.iter().any(|&(on, _)| on == stream);
            if other.tasks.front().is_some_and(waited) && self.is_ready(number) {
                other.turn.notify_one();
            }
        }
    }

    /// Whether no stream can go on before `stream` does.
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

    /// The parts of `accesses` that are read from pinned memory which no operation under way writes to.
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
    /// A copy or another call that uses what is declared.
    pub fn call(
        what: impl Into<String>,
        accesses: Vec<Access>,
        call: impl FnOnce() -> Result<(), String> + Send + 'static,
    ) -> Submitted {
        Submitted { what: what.into(), accesses, work: Work::Call(Box::new(call)) }
    }

    /// A launch, which returns what it has used.
    pub fn kernel(what: impl Into<String>, kernel: impl FnOnce() -> Ran + Send + 'static) -> Submitted {
        Submitted { what: what.into(), accesses: Vec::new(), work: Work::Kernel(Box::new(kernel)) }
    }

    /// A function of the host.
    pub fn host_function(function: impl FnOnce() + Send + 'static) -> Submitted {
        let (what, accesses) = ("host function".to_owned(), Vec::new());
        Submitted { what, accesses, work: Work::HostFunction(Box::new(function)) }
    }
}
