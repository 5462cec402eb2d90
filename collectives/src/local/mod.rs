//! Ranks as threads of one process.
//!
//! Each rank has one worker thread per group, with a queue: communication overlaps with the
//! caller's compute, and groups do not wait for each other. Ranks lend their inputs to each
//! other and every rank copies or sums straight from its peers' buffers.

mod delay;
mod family;
mod group;
mod slot;
mod worker;

use crate::buffer::Buffer;
use crate::call::{Call, CallSite};
use crate::communicator::Communicator;
use crate::error::CommError;
use crate::label::{Label, Phase};
use crate::recorder::{DEFAULT_CAPACITY, Recorder};
use crate::sync::lock;
use crate::work::Work;
use delay::Delay;
use family::Family;
use group::{Group, Member};
use std::fmt;
use std::sync::{Arc, Mutex, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use worker::{Job, Payload, Worker};

/// How long a split waits for the other ranks. Ranks split at start-up, where loading may
/// hold one of them back for long.
const SPLIT_TIMEOUT: Duration = Duration::from_secs(600);

/// Called with the world rank, first thing on each worker thread.
pub type WorkerStart = Arc<dyn Fn(usize) + Send + Sync>;

/// Settings of a [`LocalGroup`].
#[derive(Clone)]
pub struct LocalOptions {
    /// Name of the group for logs. Default `"world"`.
    pub name: String,
    /// Seed of random delays before and during each operation, to test that nothing depends
    /// on timing. Default none: no delays.
    pub random_delay_seed: Option<u64>,
    /// Upper limit of one random delay. Default 1 ms.
    pub max_delay: Duration,
    /// Number of records each rank keeps. Default [`DEFAULT_CAPACITY`].
    pub recorder_capacity: usize,
    /// Called with the rank first thing on each worker thread, also those of groups split off
    /// later (with the world rank). Lets memory accounting bind threads to ranks.
    pub on_worker_start: Option<WorkerStart>,
}

impl Default for LocalOptions {
    fn default() -> LocalOptions {
        LocalOptions {
            name: "world".into(),
            random_delay_seed: None,
            max_delay: Duration::from_millis(1),
            recorder_capacity: DEFAULT_CAPACITY,
            on_worker_start: None,
        }
    }
}

impl fmt::Debug for LocalOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalOptions")
            .field("name", &self.name)
            .field("random_delay_seed", &self.random_delay_seed)
            .field("max_delay", &self.max_delay)
            .field("recorder_capacity", &self.recorder_capacity)
            .field("on_worker_start", &self.on_worker_start.is_some())
            .finish()
    }
}

/// Makes worlds whose ranks are threads of this process.
#[derive(Debug)]
pub struct LocalGroup;

impl LocalGroup {
    /// Makes a world of `world_size` ranks, one communicator each, in rank order.
    #[allow(clippy::new_ret_no_self)] // A group is its members.
    pub fn new(world_size: usize) -> Vec<LocalCommunicator> {
        LocalGroup::with_options(world_size, LocalOptions::default())
    }

    /// Makes a world with other settings than the default.
    pub fn with_options(world_size: usize, options: LocalOptions) -> Vec<LocalCommunicator> {
        let family = Arc::new(Family::default());
        let group = Group::new(options.name.into(), (0..world_size).collect(), &family);
        let delay = options.random_delay_seed.map(|seed| Delay { seed, max: options.max_delay });
        (0..world_size)
            .map(|rank| {
                let context = RankContext {
                    world_rank: rank,
                    recorder: Arc::new(Recorder::new(options.recorder_capacity)),
                    delay: delay.clone(),
                    on_worker_start: options.on_worker_start.clone(),
                };
                let group = Arc::clone(&group);
                LocalCommunicator::start(Member { group, rank }, Arc::new(context))
            })
            .collect()
    }
}

/// What all groups of one rank share.
struct RankContext {
    world_rank: usize,
    recorder: Arc<Recorder>,
    delay: Option<Delay>,
    on_worker_start: Option<WorkerStart>,
}

impl RankContext {
    fn draw_delay(&self, site: &CallSite, point: u64) -> Option<Duration> {
        let delay = self.delay.as_ref()?;
        Some(delay.draw(self.world_rank, &site.group, site.sequence, point))
    }
}

/// A rank that is a thread of this process.
///
/// Use it from one thread per rank: the order of calls is the order of operations. Dropping
/// it leaves the group: what is still pending fails with
/// [`CommError::Aborted`] on all ranks, and so does every later operation of the group.
pub struct LocalCommunicator {
    member: Member,
    context: Arc<RankContext>,
    queue: Mutex<Queue>,
    worker: Option<JoinHandle<()>>,
}

struct Queue {
    /// Number of the next operation.
    next: u64,
    /// `None` once the communicator is being dropped.
    jobs: Option<mpsc::Sender<Job>>,
}

impl LocalCommunicator {
    fn start(member: Member, context: Arc<RankContext>) -> LocalCommunicator {
        let (jobs, queue) = mpsc::channel();
        let worker = Worker {
            group: Arc::clone(&member.group),
            rank: member.rank,
            context: Arc::clone(&context),
        };
        let spawned = thread::Builder::new()
            .name(format!("{}-{}", member.group.name, context.world_rank))
            .spawn(move || worker.run(queue));
        let worker = match spawned {
            Ok(handle) => Some(handle),
            // The queue is gone with the worker, so every operation fails with this reason.
            Err(error) => {
                let reason = format!("its worker thread could not start: {error}");
                member.group.crash(member.rank, &reason);
                None
            }
        };
        LocalCommunicator {
            member,
            context,
            queue: Mutex::new(Queue { next: 0, jobs: Some(jobs) }),
            worker,
        }
    }

    /// Queues an operation. The payload of an invalid call is dropped.
    fn issue(&self, call: Call, payload: Payload) -> Work {
        let payload = match call.problem {
            None => payload,
            Some(_) => Payload::Nothing,
        };
        let Member { group, rank } = &self.member;
        let (group, rank) = (Arc::clone(group), *rank);
        // Held until the job is queued: numbers and queue must have the same order.
        let mut queue = lock(&self.queue);
        let sequence = queue.next;
        queue.next += 1;
        let site = CallSite {
            group: Arc::clone(&group.name),
            sequence,
            rank,
            operation: call.operation,
            label: call.label.clone(),
        };
        group.issued(rank, sequence);
        let recorder = &self.context.recorder;
        let record = recorder.enqueued(&group.name, sequence, &call, rank, group.world_size());
        let (abandoned_site, abandoned_group) = (site.clone(), Arc::clone(&group));
        let timeout_site = site.clone();
        let (work, completer) = Work::pending(
            move || abandoned_group.give_up(&abandoned_site, "its worker stopped"),
            move |waited| group.time_out(&timeout_site, waited),
        );
        let job = Job { site, call, payload, record, completer };
        if let Some(jobs) = &queue.jobs {
            // A job that cannot be queued is dropped, and its completer reports that.
            let _ = jobs.send(job);
        }
        work
    }
}

impl Communicator for LocalCommunicator {
    fn rank(&self) -> usize {
        self.member.rank
    }

    fn world_size(&self) -> usize {
        self.member.group.world_size()
    }

    fn name(&self) -> &str {
        &self.member.group.name
    }

    fn backend(&self) -> &'static str {
        "local"
    }

    fn all_gather(&self, label: Label, input: Arc<Buffer>, output: Buffer) -> Work {
        let call = Call::all_gather(label, &input, &output, self.world_size());
        self.issue(call, Payload::AllGather { input, output })
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

    fn split(
        &self,
        name: &str,
        color: Option<u32>,
        key: i64,
    ) -> Result<Option<Arc<dyn Communicator>>, CommError> {
        let (reply, answer) = mpsc::channel();
        let call = Call::split(Label::new(name, Phase::Init), color, key);
        self.issue(call, Payload::Split { reply }).wait(SPLIT_TIMEOUT)?;
        Ok(answer.try_recv().ok().map(|member| {
            let context = Arc::clone(&self.context);
            Arc::new(LocalCommunicator::start(member, context)) as Arc<dyn Communicator>
        }))
    }

    fn abort(&self, reason: &str) {
        let group = &self.member.group;
        group.family.abort(group.abort_by(self.member.rank, reason));
    }

    fn recorder(&self) -> &Arc<Recorder> {
        &self.context.recorder
    }
}

impl fmt::Debug for LocalCommunicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (self as &dyn Communicator).fmt(f)
    }
}

impl Drop for LocalCommunicator {
    fn drop(&mut self) {
        // First, so that the worker stops waiting for peers; then it runs out of jobs.
        self.member.leave();
        lock(&self.queue).jobs = None;
        if let Some(worker) = self.worker.take() {
            // A panic of the worker has been reported to all ranks as an abort.
            let _ = worker.join();
        }
    }
}
