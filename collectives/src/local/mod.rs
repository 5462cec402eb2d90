//! Ranks as threads of one process.
//!
//! Each rank has one worker thread per group, with a queue: communication overlaps with the
//! caller's compute, and groups do not wait for each other. Ranks lend their inputs to each
//! other and every rank copies or sums straight from its peers' buffers, on the host or on the GPU
//! that all of them use.

mod delay;
#[cfg(feature = "cube")]
mod device;
mod family;
mod group;
mod slot;
mod transfer;

use crate::buffer::Buffer;
#[cfg(feature = "cube")]
use crate::call::ArgumentError;
use crate::call::{Call, CallSite};
use crate::error::CommError;
use crate::member::{End, Member, Payload, RankShared, WorkerStart};
use crate::recorder::{DEFAULT_CAPACITY, Recorder};
use crate::verdict::Verdict;
use delay::Delay;
use family::Family;
use group::{Group, Place};
use std::fmt;
use std::sync::Arc;
use std::thread;
use std::time::Duration;
use transfer::Transfer;

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
        let ranks: Vec<Arc<RankShared>> = (0..world_size)
            .map(|world_rank| {
                Arc::new(RankShared {
                    world_rank,
                    world_size,
                    recorder: Arc::new(Recorder::new(options.recorder_capacity)),
                    on_worker_start: options.on_worker_start.clone(),
                })
            })
            .collect();
        let family = Arc::new(Family::new(ranks.clone()));
        let group = Group::new(options.name.into(), (0..world_size).collect(), &family);
        let delay = options.random_delay_seed.map(|seed| Delay { seed, max: options.max_delay });
        ranks
            .into_iter()
            .enumerate()
            .map(|(rank, shared)| {
                let place = Place { group: Arc::clone(&group), rank };
                Member::start(LocalEnd { place, shared, delay: delay.clone() })
            })
            .collect()
    }
}

/// A rank that is a thread of this process.
///
/// Use it from one thread per rank: the order of calls is the order of operations. Dropping
/// it leaves the group: what is still pending fails with
/// [`CommError::Aborted`] on all ranks, and so does every later operation of the group.
pub type LocalCommunicator = Member<LocalEnd>;

/// A rank's end of a group of threads.
pub struct LocalEnd {
    place: Place,
    shared: Arc<RankShared>,
    delay: Option<Delay>,
}

impl LocalEnd {
    fn group(&self) -> &Group {
        &self.place.group
    }

    fn draw_delay(&self, site: &CallSite, point: u64) -> Option<Duration> {
        let delay = self.delay.as_ref()?;
        Some(delay.draw(self.shared.world_rank, &site.group, site.sequence, point))
    }

    /// The error of a transfer that this rank cannot do.
    fn failed(&self, site: &CallSite, reason: &str) -> CommError {
        self.group().abort_by(site.rank, reason).error(site)
    }

    /// Delays the transfer if random delays are on.
    fn dawdle(&self, site: &CallSite, point: u64) {
        if let Some(delay) = self.draw_delay(site, point) {
            thread::sleep(delay);
        }
    }
}

impl End for LocalEnd {
    const BACKEND: &'static str = "local";
    const SHARES_GATHERS: bool = true;

    fn name(&self) -> &Arc<str> {
        &self.place.group.name
    }

    fn world_ranks(&self) -> &[usize] {
        &self.place.group.world_ranks
    }

    fn rank(&self) -> usize {
        self.place.rank
    }

    fn shared(&self) -> &Arc<RankShared> {
        &self.shared
    }

    fn nodes(&self) -> Vec<usize> {
        vec![0; self.group().world_size()]
    }

    fn node_name(&self) -> String {
        "this process".into()
    }

    fn issued(&self, site: &CallSite, _: &Call) {
        self.group().issued(self.place.rank, site.sequence);
    }

    #[cfg(feature = "cube")]
    fn refuse_device(&self, payload: &Payload<LocalEnd>) -> Option<ArgumentError> {
        let addend = match payload {
            Payload::ReduceScatter { input, .. } => input,
            Payload::AllReduce { buffer } => buffer,
            _ => return None,
        };
        let (memory, dtype) = (addend.device()?, addend.dtype());
        (!device::has_sum(memory, dtype)).then_some(ArgumentError::NoDeviceSum { dtype })
    }

    fn execute(
        &self,
        site: &CallSite,
        call: Call,
        payload: Payload<LocalEnd>,
    ) -> Result<Buffer, CommError> {
        if let Some(delay) = self.draw_delay(site, 0) {
            self.group().pause(delay);
        }
        let (input, transfer) = Transfer::prepare(payload, site.rank);
        // What is lent to the peers must have been written.
        #[cfg(feature = "cube")]
        if let Some(memory) = input.as_ref().and_then(|input| input.device())
            && let Err(reason) = device::settle(memory)
        {
            return Err(self.give_up(site, &format!("its GPU failed: {reason}")));
        }
        self.group().enter(site, call, input)?;
        let result = transfer.run(self, site);
        match &result {
            Ok(_) => self.group().close(site),
            // Arguments were checked, so this is a bug here; the peers must not wait for us.
            Err(error) => {
                self.crash(&error.to_string());
                self.group().close(site);
            }
        }
        result
    }

    fn give_up(&self, site: &CallSite, reason: &str) -> CommError {
        self.group().give_up(site, reason)
    }

    fn time_out(&self, site: &CallSite, waited: Duration) -> CommError {
        self.group().time_out(site, waited)
    }

    fn crash(&self, reason: &str) {
        self.group().crash(self.place.rank, reason);
    }

    fn cause(&self, site: &CallSite) -> Option<CommError> {
        self.group().cause(site)
    }

    fn abort(&self, reason: &str) {
        let group = self.group();
        group.family.abort(group.abort_by(self.place.rank, reason));
    }

    fn leave(&self) {
        self.place.leave();
    }

    fn verdict(&self) -> Option<Verdict> {
        self.group().family.verdict()
    }
}
