//! A rank's membership in a group whose backend runs on a worker thread.
//!
//! Calls are numbered, recorded and queued. A worker thread runs them in order, so that communication
//! overlaps with the caller's compute and groups do not wait for each other. The group's [`Backend`] carries
//! out the operations.

use crate::backend::{Backend, Payload, empty};
use crate::buffer::{Buffer, Location};
use crate::call::{ArgumentError, Call, CallSite};
use crate::communicator::Communicator;
use crate::error::CommError;
use crate::flight::Flight;
use crate::label::{Label, Phase};
use crate::recorder::{GroupId, RecordId, Recorder};
use crate::sync::lock;
use crate::work::{Completer, Work};
#[cfg(feature = "cuda")]
use crate::{
    operation::Operation,
    transport::{ControlGroup, SplitGroup, Transport},
};
#[cfg(feature = "cube")]
use cubecl_environment::stream::StreamId;
use std::fmt;
#[cfg(feature = "cuda")]
use std::sync::OnceLock;
use std::sync::{Arc, Mutex, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// One operation in the queue of the worker.
struct Job<B> {
    site: CallSite,
    call: Call,
    payload: Payload,
    /// Of a split: takes this rank's backend of its new group.
    reply: Option<mpsc::Sender<B>>,
    record: RecordId,
    completer: Completer,
    /// The stream that the caller's work for a GPU is queued on.
    #[cfg(feature = "cube")]
    stream: StreamId,
}

impl<B: Backend> Job<B> {
    fn execute(self, backend: &B) -> (Completer, RecordId, Result<Buffer, CommError>) {
        let run = || match self.reply {
            None => backend.execute(&self.site, self.call, self.payload),
            Some(reply) => backend.split(&self.site, self.call).map(|new| {
                // If the caller is gone, the backend drops here and leaves its group.
                let _ = new.map(|new| reply.send(new));
                empty()
            }),
        };
        #[cfg(feature = "cube")]
        let result = self.stream.executes(run);
        #[cfg(not(feature = "cube"))]
        let result = run();
        (self.completer, self.record, result)
    }
}

struct Queue<B> {
    /// Number of the next operation.
    next: u64,
    /// `None` once the process group is being dropped.
    jobs: Option<mpsc::Sender<Job<B>>>,
}

/// A rank's membership in a group of ranks.
///
/// Use it from one thread per rank, because the order of calls is the order of operations. Dropping it
/// leaves the group: pending and later operations of the group fail with [`CommError::Aborted`] on all ranks.
pub struct ProcessGroup<B: Backend> {
    backend: Arc<B>,
    group: GroupId,
    queue: Mutex<Queue<B>>,
    worker: Option<JoinHandle<()>>,
    /// What moves buffers on GPUs, in place of the worker.
    #[cfg(feature = "cuda")]
    transport: OnceLock<Arc<dyn Transport>>,
}

impl<B: Backend> ProcessGroup<B> {
    /// Starts the worker thread of `backend`.
    pub(crate) fn start(backend: B) -> ProcessGroup<B> {
        let backend = Arc::new(backend);
        let shared = backend.shared();
        let group = shared.recorder.join(backend.name(), backend.world_ranks());
        let (jobs, queue) = mpsc::channel();
        let worker_backend = Arc::clone(&backend);
        let spawned = thread::Builder::new()
            .name(format!("{}-{}", backend.name(), shared.world_rank))
            .spawn(move || run(&*worker_backend, queue));
        let worker = match spawned {
            Ok(handle) => Some(handle),
            // The queue was dropped with the closure, so every operation fails with this reason.
            Err(error) => {
                backend.crash(&format!("its worker thread could not start: {error}"));
                None
            }
        };
        ProcessGroup {
            backend,
            group,
            queue: Mutex::new(Queue { next: 0, jobs: Some(jobs) }),
            worker,
            #[cfg(feature = "cuda")]
            transport: OnceLock::new(),
        }
    }

    /// What is wrong with a call whose buffers are on a GPU.
    fn refuse_device(&self, payload: &Payload) -> Option<ArgumentError> {
        #[cfg(feature = "cuda")]
        if let (Some(transport), Some(output)) = (self.transport.get(), payload.output()) {
            return transport.refuse(output);
        }
        self.backend.refuse_device(payload)
    }

    /// Queues an operation other than a split.
    fn issue(&self, call: Call, payload: Payload) -> Work {
        self.issue_with(call, payload, None)
    }

    /// Queues an operation. The payload of an invalid call is dropped.
    fn issue_with(&self, mut call: Call, payload: Payload, reply: Option<mpsc::Sender<B>>) -> Work {
        if call.location == Location::Device && call.problem.is_none() {
            call.problem = self.refuse_device(&payload);
        }
        let payload = match call.problem {
            None => payload,
            Some(_) => Payload::Nothing,
        };
        // The lock is held until the job is queued, so that jobs are queued in the order of their numbers.
        let mut queue = lock(&self.queue);
        let sequence = queue.next;
        queue.next += 1;
        let site = CallSite {
            group: Arc::clone(self.backend.name()),
            sequence,
            rank: self.backend.rank(),
            operation: call.operation,
            label: call.label.clone(),
        };
        self.backend.issued(&site, &call);
        let recorder = &self.backend.shared().recorder;
        let record = recorder.enqueued(self.group, sequence, &call, self.backend.rank());
        // The worker tells the other ranks of arguments that are wrong on this rank alone.
        #[cfg(feature = "cuda")]
        if call.location == Location::Device
            && call.problem.is_none()
            && let Some(transport) = self.transport.get()
        {
            return transport.enqueue(site, record, payload);
        }
        let (abandoned_site, abandoned_backend) = (site.clone(), Arc::clone(&self.backend));
        let (timeout_site, timeout_backend) = (site.clone(), Arc::clone(&self.backend));
        let (work, completer) = Work::pending(
            move || abandoned_backend.give_up(&abandoned_site, "its worker stopped"),
            move |waited| timeout_backend.time_out(&timeout_site, waited),
        );
        let job = Job {
            site,
            call,
            payload,
            reply,
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
impl<B: Backend> ProcessGroup<B> {
    /// The group in charge of a transport, as the transport sees it.
    pub(crate) fn control_group(&self) -> Arc<dyn ControlGroup> {
        Arc::clone(&self.backend) as Arc<dyn ControlGroup>
    }

    /// Hands buffers on GPUs to `transport` from now on. If the group has a transport already, it keeps that
    /// one and returns `transport`.
    pub(crate) fn set_transport(&self, transport: Arc<dyn Transport>) -> Result<(), Arc<dyn Transport>> {
        self.transport.set(transport)
    }

    /// Splits the transport like the group. `new_group` is this rank's new group, if it has one.
    fn split_transport(
        &self,
        name: &str,
        new_group: Option<&ProcessGroup<B>>,
        timeout: Duration,
    ) -> Result<(), CommError> {
        let Some(transport) = self.transport.get() else { return Ok(()) };
        let site = CallSite {
            group: Arc::clone(self.backend.name()),
            // The split is the last operation that this rank has issued.
            sequence: lock(&self.queue).next.saturating_sub(1),
            rank: self.backend.rank(),
            operation: Operation::Split,
            label: Label::new(name, Phase::Init),
        };
        let split = new_group.map(|group| SplitGroup {
            control: group.control_group(),
            communicator: group,
            first_world_rank: group.backend.world_ranks()[0],
        });
        let new_transport = transport.split(&site, split, timeout)?;
        if let (Some(group), Some(transport)) = (new_group, new_transport) {
            // A new group has no transport yet.
            let _ = group.set_transport(transport);
        }
        Ok(())
    }
}

/// Runs jobs in order until the queue is closed.
fn run<B: Backend>(backend: &B, queue: mpsc::Receiver<Job<B>>) {
    let _guard = CrashGuard(backend);
    let shared = backend.shared();
    if let Some(on_start) = &shared.on_worker_start {
        on_start(shared.world_rank);
    }
    for job in queue {
        shared.recorder.started(job.record);
        let (completer, record, result) = job.execute(backend);
        if result.is_ok() {
            shared.recorder.finished(record);
        }
        completer.complete(result);
    }
}

/// Fails the group if the worker panics, so that the other ranks do not wait for it.
struct CrashGuard<'a, B: Backend>(&'a B);

impl<B: Backend> Drop for CrashGuard<'_, B> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.crash("its worker panicked");
        }
    }
}

impl<B: Backend> Communicator for ProcessGroup<B> {
    fn rank(&self) -> usize {
        self.backend.rank()
    }

    fn world_size(&self) -> usize {
        self.backend.world_ranks().len()
    }

    fn name(&self) -> &str {
        self.backend.name()
    }

    fn backend(&self) -> &'static str {
        #[cfg(feature = "cuda")]
        if let Some(transport) = self.transport.get() {
            return transport.name();
        }
        B::NAME
    }

    fn all_gather(&self, label: Label, input: Arc<Buffer>, output: Buffer) -> Work {
        let call = Call::all_gather(label, &input, &output, self.world_size());
        self.issue(call, Payload::AllGather { input, output })
    }

    fn shares_gathers(&self) -> bool {
        B::SHARES_GATHERS
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
        self.issue(Call::barrier(label), Payload::Nothing)
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
        self.issue_with(call, Payload::Nothing, Some(reply)).wait(timeout)?;
        let new_group = answer.try_recv().ok().map(ProcessGroup::start);
        #[cfg(feature = "cuda")]
        self.split_transport(name, new_group.as_ref(), timeout)?;
        Ok(new_group.map(|group| Arc::new(group) as Arc<dyn Communicator>))
    }

    fn abort(&self, reason: &str) {
        self.backend.abort(reason);
    }

    fn nodes(&self) -> Vec<usize> {
        self.backend.nodes()
    }

    fn flight(&self) -> Flight {
        let shared = self.backend.shared();
        let mut flight = shared.flight(self.backend(), self.backend.node_name());
        flight.verdict = self.backend.verdict();
        flight
    }

    fn recorder(&self) -> &Arc<Recorder> {
        &self.backend.shared().recorder
    }
}

impl<B: Backend> fmt::Debug for ProcessGroup<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (self as &dyn Communicator).fmt(f)
    }
}

impl<B: Backend> Drop for ProcessGroup<B> {
    fn drop(&mut self) {
        #[cfg(feature = "cuda")]
        if let Some(transport) = self.transport.get() {
            transport.close();
        }
        // Leaving comes first: it makes the worker stop waiting for peers. Then the worker runs out of jobs.
        self.backend.leave();
        lock(&self.queue).jobs = None;
        if let Some(worker) = self.worker.take() {
            // A panic of the worker has been reported to all ranks as an abort.
            let _ = worker.join();
        }
    }
}
