//! A rank's membership in a group. Calls are numbered, recorded and queued for a worker thread, so communication
//! overlaps with compute and groups do not wait for each other. The group's [`Backend`] implements the operations.

use crate::backend::{Backend, empty};
use crate::buffer::{Buffer, Location};
use crate::call::{ArgumentError, Call, CallSite};
use crate::communicator::{Communicator, SplitResult};
use crate::error::CommError;
use crate::flight::Flight;
use crate::holds::Holds;
use crate::label::{Label, Phase};
#[cfg(feature = "cuda")]
use crate::nccl::transport::Nccl;
use crate::operation::Operation;
use crate::payload::Payload;
use crate::rank_view::RankView;
use crate::recorder::{GroupId, RecordId, Recorder};
use crate::sync::{lock, spawn};
use crate::work::{Completer, Work};
#[cfg(feature = "cube")]
use cubecl_environment::stream::StreamId;
use std::fmt;
#[cfg(feature = "cuda")]
use std::sync::OnceLock;
use std::sync::{Arc, Mutex, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

struct Job<B> {
    site: CallSite,
    call: Call,
    payload: Payload,
    reply: Option<mpsc::Sender<B>>,
    record: RecordId,
    completer: Completer,
    #[cfg(feature = "cube")]
    stream: StreamId,
}

impl<B: Backend> Job<B> {
    fn execute(self, backend: &B) -> (Completer, Result<Buffer, CommError>) {
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
        (self.completer, result)
    }
}

struct Queue<B> {
    next: u64,
    jobs: Option<mpsc::Sender<Job<B>>>,
}

/// A rank's membership in a group. Use it from one thread per rank, because the order of calls is the order of
/// operations. Dropping it leaves the group: pending and later operations fail with [`CommError::Aborted`] on all
/// ranks.
pub struct ProcessGroup<B: Backend> {
    backend: Arc<B>,
    group: GroupId,
    queue: Mutex<Queue<B>>,
    worker: Option<JoinHandle<()>>,
    #[cfg(feature = "cuda")]
    nccl: OnceLock<Nccl>,
}

impl<B: Backend> ProcessGroup<B> {
    /// Starts the worker thread of `backend`, and adds the group to the rank's flight recorder.
    pub fn start(backend: B) -> ProcessGroup<B> {
        let backend = Arc::new(backend);
        let identity = backend.identity();
        let group = identity.shared.recorder.join(&identity.name, &identity.world_ranks);
        let (jobs, queue) = mpsc::channel();
        let worker_backend = Arc::clone(&backend);
        let name = format!("{}-{}", identity.name, identity.shared.world_rank);
        let worker = spawn(&name, move || run(&*worker_backend, queue))
            // The queue was dropped with the closure, so every operation fails with this reason.
            .map_err(|error| backend.crash(&format!("its worker thread could not start: {error}")))
            .ok();
        ProcessGroup {
            backend,
            group,
            queue: Mutex::new(Queue { next: 0, jobs: Some(jobs) }),
            worker,
            #[cfg(feature = "cuda")]
            nccl: OnceLock::new(),
        }
    }

    fn refuse_device(&self, payload: &Payload) -> Option<ArgumentError> {
        #[cfg(feature = "cuda")]
        if let (Some(nccl), Some(output)) = (self.nccl.get(), payload.output()) {
            return nccl.refuse(output);
        }
        self.backend.refuse_device(payload)
    }

    fn issue(&self, label: Label, payload: Payload) -> Work {
        self.issue_call(payload.call(label, self.world_size()), payload, None)
    }

    /// Queues an operation. The payload of an invalid call is dropped.
    fn issue_call(&self, mut call: Call, mut payload: Payload, reply: Option<mpsc::Sender<B>>) -> Work {
        if call.location == Location::Device && call.problem.is_none() {
            call.problem = self.refuse_device(&payload);
        }
        if call.problem.is_some() {
            payload = Payload::Nothing;
        }
        let identity = self.backend.identity();
        // Held until the job is queued, so that jobs are queued in the order of their numbers.
        let mut queue = lock(&self.queue);
        let sequence = queue.next;
        queue.next += 1;
        let site = identity.site(sequence, call.operation, call.label.clone());
        self.backend.issued(&site, &call);
        let record = identity.shared.recorder.enqueued(self.group, sequence, &call, identity.rank);
        #[cfg(feature = "cuda")]
        if call.location == Location::Device
            && call.problem.is_none()
            && let Some(nccl) = self.nccl.get()
        {
            return nccl.enqueue(site, record, payload);
        }
        let (work, completer) = Work::pending(site.clone(), Arc::clone(&self.backend) as _);
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
            let _ = jobs.send(job);
        }
        work
    }
}

#[cfg(feature = "cuda")]
impl<B: Backend> ProcessGroup<B> {
    /// Returns this rank's side of the group, for a transport that replaces the worker.
    pub(crate) fn control(&self) -> Arc<dyn crate::backend::GroupControl> {
        Arc::clone(&self.backend) as _
    }

    /// Uses `nccl` for buffers on GPUs from now on. Returns `nccl` as the error if the group already has NCCL.
    pub(crate) fn set_nccl(&self, nccl: Nccl) -> Result<(), Nccl> {
        self.nccl.set(nccl)
    }

    fn split_nccl(
        &self,
        name: &str,
        new_group: Option<&ProcessGroup<B>>,
        timeout: Duration,
    ) -> Result<(), CommError> {
        let Some(nccl) = self.nccl.get() else { return Ok(()) };
        // The split is the last operation that this rank has issued.
        let sequence = lock(&self.queue).next.saturating_sub(1);
        let label = Label::new(name, Phase::Init);
        let site = self.backend.identity().site(sequence, Operation::Split, label);
        let split = new_group.map(|group| (group.control(), group as &dyn Communicator));
        let new_nccl = nccl.split(&site, split, timeout)?;
        if let (Some(group), Some(nccl)) = (new_group, new_nccl) {
            let _ = group.set_nccl(nccl);
        }
        Ok(())
    }
}

fn run<B: Backend>(backend: &B, queue: mpsc::Receiver<Job<B>>) {
    let _guard = CrashGuard(backend);
    let shared = &backend.identity().shared;
    shared.start_worker();
    for job in queue {
        let record = job.record;
        shared.recorder.started(record);
        let (completer, result) = job.execute(backend);
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
        self.backend.identity().rank
    }

    fn world_size(&self) -> usize {
        self.backend.identity().world_ranks.len()
    }

    fn name(&self) -> &str {
        &self.backend.identity().name
    }

    fn backend(&self) -> &'static str {
        #[cfg(feature = "cuda")]
        if self.nccl.get().is_some() {
            return Nccl::NAME;
        }
        B::NAME
    }

    fn is_one_process(&self) -> bool {
        B::IS_ONE_PROCESS
    }

    fn all_gather(&self, label: Label, input: Arc<Buffer>, output: Buffer) -> Work {
        self.issue(label, Payload::AllGather { input, output })
    }

    fn shares_gathers(&self) -> bool {
        B::SHARES_GATHERS
    }

    fn reduce_scatter(&self, label: Label, input: Arc<Buffer>, output: Buffer) -> Work {
        self.issue(label, Payload::ReduceScatter { input, output })
    }

    fn all_reduce(&self, label: Label, buffer: Buffer) -> Work {
        self.issue(label, Payload::AllReduce { buffer })
    }

    fn broadcast(&self, label: Label, buffer: Buffer, root: usize) -> Work {
        self.issue(label, Payload::Broadcast { buffer, root })
    }

    fn barrier(&self, label: Label) -> Work {
        self.issue(label, Payload::Nothing)
    }

    fn split_within(&self, name: &str, color: Option<u32>, key: i64, timeout: Duration) -> SplitResult {
        let (reply, answer) = mpsc::channel();
        let call = Call::split(Label::new(name, Phase::Init), color, key);
        self.issue_call(call, Payload::Nothing, Some(reply)).wait(timeout)?;
        let new_group = answer.try_recv().ok().map(ProcessGroup::start);
        #[cfg(feature = "cuda")]
        self.split_nccl(name, new_group.as_ref(), timeout)?;
        Ok(new_group.map(|group| Arc::new(group) as _))
    }

    fn abort(&self, reason: &str) {
        self.backend.abort(reason);
    }

    fn hold(&self, is_held: bool) {
        self.backend.hold(is_held);
    }

    fn shares_holds(&self) -> bool {
        B::SHARES_HOLDS
    }

    fn holds(&self) -> &Holds {
        &self.backend.identity().shared.holds
    }

    fn failure(&self) -> Option<CommError> {
        let sequence = lock(&self.queue).next;
        let site =
            self.backend.identity().site(sequence, Operation::Barrier, Label::new("hold", Phase::Other));
        self.backend.cause(&site)
    }

    fn nodes(&self) -> Vec<usize> {
        self.backend.nodes()
    }

    fn flight(&self) -> Flight {
        let mut flight = self.backend.identity().shared.flight(self.backend(), usize::MAX);
        flight.verdict = self.backend.verdict();
        flight
    }

    fn recorder(&self) -> &Arc<Recorder> {
        &self.backend.identity().shared.recorder
    }

    fn view(&self) -> RankView {
        let shared = Arc::clone(&self.backend.identity().shared);
        RankView::new(shared, self.backend(), self.backend.ask_all())
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
        if let Some(nccl) = self.nccl.get() {
            nccl.close();
        }
        // Leaving first makes the worker stop waiting for peers. Then it runs out of jobs.
        self.backend.leave();
        lock(&self.queue).jobs = None;
        if let Some(worker) = self.worker.take() {
            // A panic of the worker has been reported to all ranks as an abort.
            let _ = worker.join();
        }
    }
}
