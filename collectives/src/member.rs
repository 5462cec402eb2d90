//! What backends with a worker thread share: a rank's membership in a group.
//!
//! Calls are numbered, recorded and queued; a worker thread runs them in order, so that
//! communication overlaps with the caller's compute and groups do not wait for each other. What an
//! operation does is up to the backend's [`End`].

use crate::buffer::{Buffer, Location};
use crate::call::{ArgumentError, Call, CallSite};
use crate::communicator::Communicator;
use crate::dtype::DType;
use crate::error::CommError;
use crate::flight::Flight;
use crate::label::{Label, Phase};
use crate::recorder::{GroupId, RecordId, Recorder};
use crate::sync::lock;
use crate::verdict::Verdict;
use crate::work::{Completer, Work};
#[cfg(feature = "cuda")]
use crate::{
    operation::Operation,
    transport::{Guardian, Movement, NewPlace, Transport},
};
#[cfg(feature = "cube")]
use cubecl_environment::stream::StreamId;
use std::fmt;
#[cfg(feature = "cuda")]
use std::sync::OnceLock;
use std::sync::{Arc, Mutex, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Called with the world rank, first thing on each worker thread.
pub type WorkerStart = Arc<dyn Fn(usize) + Send + Sync>;

/// A rank's end of a group in one backend. Dropping it, or [`End::leave`], leaves the group.
pub trait End: Send + Sync + Sized + 'static {
    /// Name of the backend.
    const BACKEND: &'static str;

    /// As [`Communicator::shares_gathers`].
    const SHARES_GATHERS: bool = false;

    /// Name of the group.
    fn name(&self) -> &Arc<str>;

    /// World ranks of the members.
    fn world_ranks(&self) -> &[usize];

    /// This rank's number in the group.
    fn rank(&self) -> usize;

    /// What all groups of this rank share.
    fn shared(&self) -> &Arc<RankShared>;

    /// Machine of each member, as for [`Communicator::nodes`].
    fn nodes(&self) -> Vec<usize>;

    /// Machine of this rank, for people.
    fn node_name(&self) -> String;

    /// Notes that the caller has issued `site`, before it is queued.
    fn issued(&self, site: &CallSite, call: &Call);

    /// What stands in the way of a call whose buffers are on a GPU. Only asked about those.
    fn refuse_device(&self, _payload: &Payload<Self>) -> Option<ArgumentError> {
        Some(ArgumentError::NoDeviceTransport)
    }

    /// Runs one operation, on the worker thread. Work that it gives to a GPU joins the queue of the
    /// thread that issued the operation.
    fn execute(
        &self,
        site: &CallSite,
        call: Call,
        payload: Payload<Self>,
    ) -> Result<Buffer, CommError>;

    /// Fails the group on behalf of the caller, unless it has failed already; returns the cause.
    fn give_up(&self, site: &CallSite, reason: &str) -> CommError;

    /// Fails the group because a wait ran out, unless it has failed already; returns the cause.
    fn time_out(&self, site: &CallSite, waited: Duration) -> CommError;

    /// Notes that the worker is gone, perhaps in the middle of an operation.
    fn crash(&self, reason: &str);

    /// Why the group has failed, if it has.
    fn cause(&self, site: &CallSite) -> Option<CommError>;

    /// Fails all groups of the world, on all ranks.
    fn abort(&self, reason: &str);

    /// Ends this rank's part in the group. What runs now is interrupted if it needs other ranks.
    fn leave(&self);

    /// What all ranks together found after a failure.
    fn verdict(&self) -> Option<Verdict>;
}

/// What all groups of one rank share.
pub struct RankShared {
    /// Rank in the world.
    pub world_rank: usize,
    /// Ranks in the world.
    pub world_size: usize,
    /// Records of all groups.
    pub recorder: Arc<Recorder>,
    /// Called first thing on each worker thread.
    pub on_worker_start: Option<WorkerStart>,
}

/// The buffers of an operation.
pub enum Payload<E> {
    /// Of an all-gather.
    AllGather {
        /// This rank's part.
        input: Arc<Buffer>,
        /// All parts.
        output: Buffer,
    },
    /// Of a reduce-scatter.
    ReduceScatter {
        /// Addends.
        input: Arc<Buffer>,
        /// This rank's part of the sum.
        output: Buffer,
    },
    /// Of an all-reduce.
    AllReduce {
        /// Addend, then sum.
        buffer: Buffer,
    },
    /// Of a broadcast.
    Broadcast {
        /// The root's is sent, the others' are overwritten.
        buffer: Buffer,
        /// Who sends.
        root: usize,
    },
    /// None.
    Barrier,
    /// Of a split.
    Split {
        /// Where the membership in the new group goes.
        reply: mpsc::Sender<E>,
    },
    /// Arguments were invalid; the call is still posted so that all ranks learn of it.
    Nothing,
}

#[cfg(feature = "cuda")]
impl<E> Payload<E> {
    /// The buffer that the operation fills.
    fn output(&self) -> Option<&Buffer> {
        match self {
            Payload::AllGather { output, .. } | Payload::ReduceScatter { output, .. } => {
                Some(output)
            }
            Payload::AllReduce { buffer } | Payload::Broadcast { buffer, .. } => Some(buffer),
            Payload::Barrier | Payload::Split { .. } | Payload::Nothing => None,
        }
    }
}

/// One operation in the queue.
struct Job<E> {
    site: CallSite,
    call: Call,
    payload: Payload<E>,
    record: RecordId,
    completer: Completer,
    /// Where the caller's work for a GPU is queued.
    #[cfg(feature = "cube")]
    stream: StreamId,
}

impl<E: End> Job<E> {
    fn execute(self, end: &E) -> (Completer, RecordId, Result<Buffer, CommError>) {
        let run = || end.execute(&self.site, self.call, self.payload);
        #[cfg(feature = "cube")]
        let result = self.stream.executes(run);
        #[cfg(not(feature = "cube"))]
        let result = run();
        (self.completer, self.record, result)
    }
}

struct Queue<E> {
    /// Number of the next operation.
    next: u64,
    /// `None` once the membership is being dropped.
    jobs: Option<mpsc::Sender<Job<E>>>,
}

/// A rank's membership in a group.
///
/// Use it from one thread per rank: the order of calls is the order of operations. Dropping
/// it leaves the group: what is still pending fails with
/// [`CommError::Aborted`] on all ranks, and so does every later operation of the group.
pub struct Member<E: End> {
    end: Arc<E>,
    group: GroupId,
    queue: Mutex<Queue<E>>,
    worker: Option<JoinHandle<()>>,
    /// Where buffers on GPUs go instead of to the worker.
    #[cfg(feature = "cuda")]
    transport: OnceLock<Arc<dyn Transport>>,
}

impl<E: End> Member<E> {
    pub(crate) fn start(end: E) -> Member<E> {
        let end = Arc::new(end);
        let shared = end.shared();
        let group = shared.recorder.join(end.name(), end.world_ranks());
        let (jobs, queue) = mpsc::channel();
        let worker_end = Arc::clone(&end);
        let spawned = thread::Builder::new()
            .name(format!("{}-{}", end.name(), shared.world_rank))
            .spawn(move || run(&*worker_end, queue));
        let worker = match spawned {
            Ok(handle) => Some(handle),
            // The queue is gone with the worker, so every operation fails with this reason.
            Err(error) => {
                end.crash(&format!("its worker thread could not start: {error}"));
                None
            }
        };
        Member {
            end,
            group,
            queue: Mutex::new(Queue { next: 0, jobs: Some(jobs) }),
            worker,
            #[cfg(feature = "cuda")]
            transport: OnceLock::new(),
        }
    }

    /// What is wrong with a call whose buffers are on a GPU.
    fn refuse_device(&self, payload: &Payload<E>) -> Option<ArgumentError> {
        #[cfg(feature = "cuda")]
        if let (Some(transport), Some(output)) = (self.transport.get(), payload.output()) {
            return transport.refuse(output);
        }
        self.end.refuse_device(payload)
    }

    /// Queues an operation. The payload of an invalid call is dropped.
    fn issue(&self, mut call: Call, payload: Payload<E>) -> Work {
        if call.location == Location::Device && call.problem.is_none() {
            call.problem = self.refuse_device(&payload);
        }
        let payload = match call.problem {
            None => payload,
            Some(_) => Payload::Nothing,
        };
        // Held until the job is queued: numbers and queue must have the same order.
        let mut queue = lock(&self.queue);
        let sequence = queue.next;
        queue.next += 1;
        let site = CallSite {
            group: Arc::clone(self.end.name()),
            sequence,
            rank: self.end.rank(),
            operation: call.operation,
            label: call.label.clone(),
        };
        self.end.issued(&site, &call);
        let recorder = &self.end.shared().recorder;
        let record = recorder.enqueued(self.group, sequence, &call, self.end.rank());
        // What is wrong on this rank alone, the others hear from the worker.
        #[cfg(feature = "cuda")]
        let payload = match self.transport.get() {
            Some(transport) if call.location == Location::Device && call.problem.is_none() => {
                match Movement::of(payload) {
                    Some(movement) => return transport.enqueue(site, record, movement),
                    None => Payload::Nothing,
                }
            }
            _ => payload,
        };
        let (abandoned_site, abandoned_end) = (site.clone(), Arc::clone(&self.end));
        let (timeout_site, timeout_end) = (site.clone(), Arc::clone(&self.end));
        let (work, completer) = Work::pending(
            move || abandoned_end.give_up(&abandoned_site, "its worker stopped"),
            move |waited| timeout_end.time_out(&timeout_site, waited),
        );
        let job = Job {
            site,
            call,
            payload,
            record,
            completer,
            #[cfg(feature = "cube")]
            stream: StreamId::current(),
        };
        if let Some(jobs) = &queue.jobs {
            // A job that cannot be queued is dropped, and its completer reports that.
            let _ = jobs.send(job);
        }
        work
    }
}

#[cfg(feature = "cuda")]
impl<E: End> Member<E> {
    /// The group, as a transport sees it.
    pub(crate) fn guardian(&self) -> Arc<dyn Guardian> {
        Arc::clone(&self.end) as Arc<dyn Guardian>
    }

    /// Sends buffers on GPUs this way from now on, unless they go another way already: then that stays,
    /// and `transport` is returned.
    pub(crate) fn set_transport(
        &self,
        transport: Arc<dyn Transport>,
    ) -> Result<(), Arc<dyn Transport>> {
        self.transport.set(transport)
    }

    /// Gives `part`, this rank's part of a split, a part of the transport.
    fn split_transport(
        &self,
        name: &str,
        part: Option<&Member<E>>,
        timeout: Duration,
    ) -> Result<(), CommError> {
        let Some(transport) = self.transport.get() else { return Ok(()) };
        let site = CallSite {
            group: Arc::clone(self.end.name()),
            // Of the split, which is the last operation that this rank has issued.
            sequence: lock(&self.queue).next.saturating_sub(1),
            rank: self.end.rank(),
            operation: Operation::Split,
            label: Label::new(name, Phase::Init),
        };
        let place = part.map(|part| NewPlace {
            group: part.guardian(),
            control: part,
            first: part.end.world_ranks()[0],
        });
        let divided = transport.split(&site, place, timeout)?;
        if let (Some(part), Some(divided)) = (part, divided) {
            // A new part has none.
            let _ = part.set_transport(divided);
        }
        Ok(())
    }
}

/// Runs jobs in order until the queue is closed.
fn run<E: End>(end: &E, queue: mpsc::Receiver<Job<E>>) {
    let _guard = CrashGuard(end);
    let shared = end.shared();
    if let Some(on_start) = &shared.on_worker_start {
        on_start(shared.world_rank);
    }
    for job in queue {
        shared.recorder.started(job.record);
        let (completer, record, result) = job.execute(end);
        if result.is_ok() {
            shared.recorder.finished(record);
        }
        completer.complete(result);
    }
}

/// Frees the peers if the worker panics.
struct CrashGuard<'a, E: End>(&'a E);

impl<E: End> Drop for CrashGuard<'_, E> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.crash("its worker panicked");
        }
    }
}

impl<E: End> Communicator for Member<E> {
    fn rank(&self) -> usize {
        self.end.rank()
    }

    fn world_size(&self) -> usize {
        self.end.world_ranks().len()
    }

    fn name(&self) -> &str {
        self.end.name()
    }

    fn backend(&self) -> &'static str {
        #[cfg(feature = "cuda")]
        if let Some(transport) = self.transport.get() {
            return transport.name();
        }
        E::BACKEND
    }

    fn all_gather(&self, label: Label, input: Arc<Buffer>, output: Buffer) -> Work {
        let call = Call::all_gather(label, &input, &output, self.world_size());
        self.issue(call, Payload::AllGather { input, output })
    }

    fn shares_gathers(&self) -> bool {
        E::SHARES_GATHERS
    }

    fn reduce_scatter(&self, label: Label, input: Arc<Buffer>, output: Buffer) -> Work {
        let call = Call::reduce_scatter(label, &input, &output, self.world_size());
        self.issue(call, Payload::ReduceScatter { input, output })
    }

    fn all_reduce(&self, label: Label, buffer: Buffer) -> Work {
        let call = Call::all_reduce(label, &buffer);
        self.issue(call, Payload::AllReduce { buffer })
    }

    fn broadcast(&self, label: Label, buffer: Buffer, root: usize) -> Work {
        let call = Call::broadcast(label, &buffer, root, self.world_size());
        self.issue(call, Payload::Broadcast { buffer, root })
    }

    fn barrier(&self, label: Label) -> Work {
        self.issue(Call::barrier(label), Payload::Barrier)
    }

    fn split_within(
        &self,
        name: &str,
        color: Option<u32>,
        key: i64,
        timeout: Duration,
    ) -> Result<Option<Arc<dyn Communicator>>, CommError> {
        let (reply, answer) = mpsc::channel();
        let call = Call::split(Label::new(name, Phase::Init), color, key);
        self.issue(call, Payload::Split { reply }).wait(timeout)?;
        let part = answer.try_recv().ok().map(Member::start);
        #[cfg(feature = "cuda")]
        self.split_transport(name, part.as_ref(), timeout)?;
        Ok(part.map(|part| Arc::new(part) as Arc<dyn Communicator>))
    }

    fn abort(&self, reason: &str) {
        self.end.abort(reason);
    }

    fn nodes(&self) -> Vec<usize> {
        self.end.nodes()
    }

    fn flight(&self) -> Flight {
        let shared = self.end.shared();
        let mut flight = shared.flight(self.backend(), self.end.node_name());
        flight.verdict = self.end.verdict();
        flight
    }

    fn recorder(&self) -> &Arc<Recorder> {
        &self.end.shared().recorder
    }
}

impl RankShared {
    /// The state of all groups of this rank.
    pub(crate) fn flight(&self, backend: &str, node: String) -> Flight {
        Flight {
            rank: self.world_rank,
            world_size: self.world_size,
            backend: backend.to_owned(),
            node,
            process: std::process::id(),
            activity: self.recorder.activity(),
            groups: self.recorder.groups(),
            verdict: None,
            records: self.recorder.records(),
            clock: self.recorder.clock(),
            stall: None,
        }
    }
}

impl<E: End> fmt::Debug for Member<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (self as &dyn Communicator).fmt(f)
    }
}

impl<E: End> Drop for Member<E> {
    fn drop(&mut self) {
        #[cfg(feature = "cuda")]
        if let Some(transport) = self.transport.get() {
            transport.close();
        }
        // First, so that the worker stops waiting for peers; then it runs out of jobs.
        self.end.leave();
        lock(&self.queue).jobs = None;
        if let Some(worker) = self.worker.take() {
            // A panic of the worker has been reported to all ranks as an abort.
            let _ = worker.join();
        }
    }
}

/// The result of operations that have none.
pub(crate) fn empty() -> Buffer {
    Buffer::zeros(DType::U8, 0)
}
