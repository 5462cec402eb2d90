use crate::buffer::Buffer;
use crate::call::{ArgumentError, Call, CallSite};
use crate::diagnosis::Witness;
use crate::dtype::DType;
use crate::error::{Abort, CommError};
use crate::flight::Flight;
use crate::holds::Holds;
use crate::label::Label;
use crate::operation::Operation;
use crate::payload::Payload;
use crate::recorder::Recorder;
use crate::verdict::Verdict;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// A callback that runs first on every worker thread, with the world rank as its argument.
#[derive(Clone)]
pub struct WorkerStart(Arc<dyn Fn(usize) + Send + Sync>);

impl WorkerStart {
    /// Wraps `call`.
    pub fn new(call: impl Fn(usize) + Send + Sync + 'static) -> WorkerStart {
        WorkerStart(Arc::new(call))
    }
}

impl fmt::Debug for WorkerStart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WorkerStart")
    }
}

/// Asks all ranks of a world what they are doing, and waits at most the given time for the answers.
pub type AskAll = Arc<dyn Fn(Duration) -> Vec<Witness> + Send + Sync>;

/// One rank's side of a group that can fail: stores the cause and informs the other ranks. [`Work`](crate::Work) needs
/// only this part of a [`Backend`].
pub trait GroupControl: Send + Sync {
    /// The name and members of the group, and this rank's number in it.
    fn identity(&self) -> &GroupRank;

    /// Returns why the group has failed, if it has.
    fn cause(&self, site: &CallSite) -> Option<CommError>;

    /// Fails the group on all ranks with `abort`, unless it has failed already.
    fn fail(&self, abort: Abort);

    /// Fails the group on behalf of the caller, unless it has failed already; returns the cause.
    fn give_up(&self, site: &CallSite, reason: &str) -> CommError {
        let by = self.identity().abort(reason);
        self.fail(by.clone());
        self.cause(site).unwrap_or_else(|| CommError::Aborted { site: site.clone(), by })
    }

    /// Fails the group because a wait timed out, unless it has failed already; returns the cause.
    fn time_out(&self, site: &CallSite, waited: Duration) -> CommError;

    /// Fails all groups of the world, on all ranks.
    fn abort(&self, reason: &str);

    /// Records whether a debugger or user holds this rank, and informs the other ranks.
    fn hold(&self, is_held: bool) {
        let shared = &self.identity().shared;
        shared.holds.set(shared.world_rank, is_held);
    }
}

/// One rank's operations in one group, for [`ProcessGroup`](crate::ProcessGroup). Dropping it, or calling
/// [`Backend::leave`], leaves the group. The worker thread calls [`Backend::execute`] and [`Backend::split`], one at a
/// time and in the order of the calls; any thread may call the other methods at any time. The [crate
/// documentation](crate#a-custom-backend) shows where to start.
pub trait Backend: GroupControl + Sized + 'static {
    /// Name of the backend, as [`Communicator::backend`](crate::Communicator::backend) returns it.
    const NAME: &'static str;

    /// Result of [`Communicator::shares_gathers`](crate::Communicator::shares_gathers).
    const SHARES_GATHERS: bool = false;

    /// Result of [`Communicator::is_one_process`](crate::Communicator::is_one_process).
    const IS_ONE_PROCESS: bool = false;

    /// Result of [`Communicator::shares_holds`](crate::Communicator::shares_holds).
    const SHARES_HOLDS: bool = false;

    /// Returns the machine number of each rank, like [`Communicator::nodes`](crate::Communicator::nodes).
    fn nodes(&self) -> Vec<usize>;

    /// Records that the caller has issued the operation at `site`, before the operation is queued.
    fn issued(&self, site: &CallSite, call: &Call);

    /// Returns why this backend cannot run a call with buffers on a GPU, if it cannot. Called only for such calls.
    /// Backends for host buffers keep the default.
    fn refuse_device(&self, _payload: &Payload) -> Option<ArgumentError> {
        Some(ArgumentError::NoDeviceTransport)
    }

    /// Runs one operation: waits until all ranks have called it, compares their calls ([`Call::agree`]), moves the data
    /// and returns the filled buffer. Afterwards, even after an error, no other rank reads `payload`. An invalid call
    /// ([`Call::problem`]) comes with [`Payload::Nothing`], so that the other ranks learn of the error. GPU work joins
    /// the calling thread's queue.
    ///
    /// # Errors
    ///
    /// The cause of the group's failure.
    fn execute(&self, site: &CallSite, call: Call, payload: Payload) -> Result<Buffer, CommError>;

    /// Runs a split. Returns the backend of this rank's new group, or `None` if this rank joins none.
    ///
    /// # Errors
    ///
    /// The cause of the group's failure.
    fn split(&self, site: &CallSite, call: Call) -> Result<Option<Self>, CommError>;

    /// Records that the worker thread has stopped, perhaps in the middle of an operation.
    fn crash(&self, reason: &str) {
        self.fail(self.identity().abort(reason));
    }

    /// Leaves the group. Interrupts a running operation that needs other ranks.
    fn leave(&self) {
        self.fail(self.identity().left());
    }

    /// Returns the verdict that all ranks reached after a failure, if any.
    fn verdict(&self) -> Option<Verdict>;

    /// Returns a function that asks all ranks of the world, if this rank can. It may outlive the backend.
    fn ask_all(&self) -> Option<AskAll> {
        None
    }
}

/// One rank's membership in a group.
pub struct GroupRank {
    /// Name of the group.
    pub name: Arc<str>,
    /// This rank's number in the group.
    pub rank: usize,
    /// World rank of each rank of the group.
    pub world_ranks: Vec<usize>,
    /// State that all groups of this rank share.
    pub shared: Arc<RankShared>,
}

impl GroupRank {
    pub(crate) fn site(&self, sequence: u64, operation: Operation, label: Label) -> CallSite {
        CallSite { group: Arc::clone(&self.name), sequence, rank: self.rank, operation, label }
    }

    /// Returns an abort caused by this rank.
    pub fn abort(&self, reason: &str) -> Abort {
        let (group, reason) = (Arc::clone(&self.name), Arc::from(reason));
        Abort { group, rank: self.rank, world_rank: self.shared.world_rank, reason }
    }

    /// Returns the abort for operations after this rank has left the group.
    pub fn left(&self) -> Abort {
        self.abort(&format!("rank {} left the group", self.rank))
    }
}

/// State that all groups of one rank share.
pub struct RankShared {
    /// Rank in the world.
    pub world_rank: usize,
    /// Number of ranks in the world.
    pub world_size: usize,
    /// Name of this rank's machine, for messages.
    pub node: String,
    /// Flight recorder of all groups.
    pub recorder: Arc<Recorder>,
    /// The held ranks. Ranks of one process may share this set.
    pub holds: Arc<Holds>,
    /// Runs first on every worker thread.
    pub on_worker_start: Option<WorkerStart>,
}

impl RankShared {
    /// Creates the state of a rank whose flight recorder keeps `capacity` records.
    pub fn new(
        world_rank: usize,
        world_size: usize,
        node: &str,
        capacity: usize,
        holds: Arc<Holds>,
        on_worker_start: Option<WorkerStart>,
    ) -> Arc<RankShared> {
        let (node, recorder) = (node.to_owned(), Arc::new(Recorder::new(capacity)));
        Arc::new(RankShared { world_rank, world_size, node, recorder, holds, on_worker_start })
    }

    pub(crate) fn start_worker(&self) {
        if let Some(WorkerStart(call)) = &self.on_worker_start {
            call(self.world_rank);
        }
    }

    /// Returns the rank's flight, with at most the last `records` records and without a verdict.
    pub fn flight(&self, backend: &str, records: usize) -> Flight {
        Flight {
            rank: self.world_rank,
            world_size: self.world_size,
            backend: backend.to_owned(),
            node: self.node.clone(),
            process: std::process::id(),
            activity: self.recorder.activity(),
            groups: self.recorder.groups(),
            verdict: None,
            records: self.recorder.last_records(records),
            clock: self.recorder.clock(),
            stall: None,
        }
    }

    pub(crate) fn short_flight(&self, backend: &str) -> Box<Flight> {
        const RECORDS: usize = 64;
        Box::new(self.flight(backend, RECORDS))
    }
}

/// Numbers machines in the order of their first appearance in `names`, one entry per rank.
pub(crate) fn number_nodes<'a>(names: impl Iterator<Item = &'a str>) -> Vec<usize> {
    let mut known: Vec<&str> = Vec::new();
    let number = |name| {
        known.iter().position(|other| *other == name).unwrap_or_else(|| {
            known.push(name);
            known.len() - 1
        })
    };
    names.map(number).collect()
}

pub(crate) fn empty() -> Buffer {
    Buffer::zeros(DType::U8, 0)
}
