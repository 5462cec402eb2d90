//! The backend whose ranks are threads of this process.

use super::delay::Delay;
#[cfg(feature = "cube")]
use super::device;
use super::group::{Group, Membership};
use super::transfer::{Exchange, divide};
use super::world::{BACKEND, World};
use crate::backend::{AskAll, Backend, GroupControl, GroupRank, RankShared, WorkerStart};
use crate::buffer::Buffer;
#[cfg(feature = "cube")]
use crate::call::ArgumentError;
use crate::call::{Call, CallSite};
use crate::diagnosis::Witness;
use crate::error::{Abort, CommError};
use crate::holds::Holds;
use crate::payload::Payload;
use crate::process_group::ProcessGroup;
use crate::recorder::DEFAULT_CAPACITY;
use crate::verdict::Verdict;
use std::sync::Arc;
use std::time::Duration;

/// Settings of a [`LocalGroup`].
#[derive(Clone, Debug)]
pub struct LocalOptions {
    /// Seed of random delays in each operation, for tests of timing. Default: no delays.
    pub random_delay_seed: Option<u64>,
    /// Upper limit of each random delay. Default 1 ms.
    pub max_delay: Duration,
    /// Number of records that each rank keeps. Default [`DEFAULT_CAPACITY`].
    pub recorder_capacity: usize,
    /// Runs first on every worker thread, also of groups split off later, with the world rank as its argument. Lets
    /// memory accounting bind threads to ranks. Default none.
    pub on_worker_start: Option<WorkerStart>,
}

impl Default for LocalOptions {
    fn default() -> LocalOptions {
        LocalOptions {
            random_delay_seed: None,
            max_delay: Duration::from_millis(1),
            recorder_capacity: DEFAULT_CAPACITY,
            on_worker_start: None,
        }
    }
}

/// Creates worlds whose ranks are threads of this process.
#[derive(Debug)]
pub struct LocalGroup;

impl LocalGroup {
    /// Creates a world of `world_size` ranks named `"world"`; returns their communicators in rank order.
    #[allow(clippy::new_ret_no_self)] // A group is its ranks.
    pub fn new(world_size: usize) -> Vec<LocalCommunicator> {
        LocalGroup::with_options(world_size, LocalOptions::default())
    }

    /// Creates a world with `options`.
    pub fn with_options(world_size: usize, options: LocalOptions) -> Vec<LocalCommunicator> {
        let holds = Arc::<Holds>::default();
        let shared = |rank| {
            let (holds, on_worker_start) = (Arc::clone(&holds), options.on_worker_start.clone());
            let capacity = options.recorder_capacity;
            RankShared::new(rank, world_size, "this process", capacity, holds, on_worker_start)
        };
        let delay = options.random_delay_seed.map(|seed| Delay { seed, max: options.max_delay });
        let world = Arc::new(World::new((0..world_size).map(shared).collect(), delay));
        let group = Group::new("world".into(), (0..world_size).collect(), &world);
        let membership = |rank| Membership { group: Arc::clone(&group), rank };
        (0..world_size).map(|rank| ProcessGroup::start(LocalBackend::new(membership(rank)))).collect()
    }
}

/// A rank that is a thread of this process. Use it from one thread, because the order of calls is the order of
/// operations. Dropping it leaves the group: pending and later operations fail with [`CommError::Aborted`] on all
/// ranks.
pub type LocalCommunicator = ProcessGroup<LocalBackend>;

/// The backend of one rank of a group of threads.
pub struct LocalBackend {
    membership: Membership,
    identity: GroupRank,
}

impl LocalBackend {
    fn new(membership: Membership) -> LocalBackend {
        let Membership { group, rank } = &membership;
        let shared = Arc::clone(&group.world.ranks[group.world_ranks[*rank]]);
        let (name, world_ranks) = (Arc::clone(&group.name), group.world_ranks.clone());
        LocalBackend { identity: GroupRank { name, rank: *rank, world_ranks, shared }, membership }
    }

    fn group(&self) -> &Group {
        &self.membership.group
    }
}

impl GroupControl for LocalBackend {
    fn identity(&self) -> &GroupRank {
        &self.identity
    }

    fn cause(&self, site: &CallSite) -> Option<CommError> {
        self.group().cause(site)
    }

    fn fail(&self, abort: Abort) {
        self.group().fail(abort);
    }

    fn time_out(&self, site: &CallSite, waited: Duration) -> CommError {
        self.group().time_out(site, waited)
    }

    fn abort(&self, reason: &str) {
        self.group().world.abort(self.identity.abort(reason));
    }
}

impl Backend for LocalBackend {
    const NAME: &'static str = BACKEND;
    const SHARES_GATHERS: bool = true;
    const IS_ONE_PROCESS: bool = true;
    const SHARES_HOLDS: bool = true;

    fn nodes(&self) -> Vec<usize> {
        vec![0; self.group().world_size()]
    }

    fn issued(&self, site: &CallSite, _: &Call) {
        self.group().issued(site.rank, site.sequence);
    }

    #[cfg(feature = "cube")]
    fn refuse_device(&self, payload: &Payload) -> Option<ArgumentError> {
        let addend = match payload {
            Payload::ReduceScatter { input, .. } => input,
            Payload::AllReduce { buffer } => buffer,
            _ => return None,
        };
        let (memory, dtype) = (addend.device()?, addend.dtype());
        (!device::has_sum(memory, dtype)).then_some(ArgumentError::NoDeviceSum { dtype })
    }

    fn execute(&self, site: &CallSite, call: Call, payload: Payload) -> Result<Buffer, CommError> {
        let exchange = Exchange { group: self.group(), site };
        exchange.delay_entry();
        let (deposit, target) = divide(payload, site.rank);
        // The GPU must have finished writing a deposit before the peers read it.
        #[cfg(feature = "cube")]
        if let Some(memory) = deposit.as_ref().and_then(|deposit| deposit.device())
            && let Err(reason) = device::synchronize(memory)
        {
            return Err(self.give_up(site, &format!("its GPU failed: {reason}")));
        }
        self.group().enter(site, call, deposit)?;
        let result = exchange.run(target);
        if let Err(error) = &result {
            // The arguments were checked, so this is a bug; the peers must not wait for this rank.
            self.crash(&error.to_string());
        }
        self.group().close(site);
        result
    }

    fn split(&self, site: &CallSite, call: Call) -> Result<Option<LocalBackend>, CommError> {
        Exchange { group: self.group(), site }.delay_entry();
        self.group().enter(site, call, None)?;
        let membership = self.group().take_membership(site);
        self.group().close(site);
        Ok(membership.map(LocalBackend::new))
    }

    fn crash(&self, reason: &str) {
        self.group().crash(self.identity.rank, reason);
    }

    fn verdict(&self) -> Option<Verdict> {
        self.group().world.verdict()
    }

    fn ask_all(&self) -> Option<AskAll> {
        let ranks = self.group().world.ranks.clone();
        let witness = |rank: &Arc<RankShared>| Witness::Answered(rank.short_flight(BACKEND));
        Some(Arc::new(move |_| ranks.iter().map(witness).collect()))
    }
}
