//! The backend whose ranks are threads of this process.

use super::delay::Delay;
#[cfg(feature = "cube")]
use super::device;
use super::group::{Group, Membership};
use super::options::LocalOptions;
use super::transfer::{Exchange, Transfer};
use super::world::{self, World};
use crate::backend::{Backend, Payload, RankShared};
use crate::buffer::Buffer;
#[cfg(feature = "cube")]
use crate::call::ArgumentError;
use crate::call::{Call, CallSite};
use crate::error::CommError;
use crate::process_group::ProcessGroup;
use crate::recorder::Recorder;
use crate::verdict::Verdict;
use std::sync::Arc;
use std::time::Duration;

/// Makes worlds whose ranks are threads of this process.
#[derive(Debug)]
pub struct LocalGroup;

impl LocalGroup {
    /// Makes a world of `world_size` ranks, one communicator each, in rank order.
    #[allow(clippy::new_ret_no_self)] // A group is its ranks.
    pub fn new(world_size: usize) -> Vec<LocalCommunicator> {
        LocalGroup::with_options(world_size, LocalOptions::default())
    }

    /// Makes a world with `options`.
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
        let world = Arc::new(World::new(ranks.clone()));
        let group = Group::new(options.name.into(), (0..world_size).collect(), &world);
        let delay = options.random_delay_seed.map(|seed| Delay { seed, max: options.max_delay });
        ranks
            .into_iter()
            .enumerate()
            .map(|(rank, shared)| {
                let membership = Membership { group: Arc::clone(&group), rank };
                ProcessGroup::start(LocalBackend { membership, shared, delay: delay.clone() })
            })
            .collect()
    }
}

/// A rank that is a thread of this process.
///
/// Use it from one thread per rank, because the order of calls is the order of operations. Dropping it
/// leaves the group: pending and later operations of the group fail with [`CommError::Aborted`] on all ranks.
pub type LocalCommunicator = ProcessGroup<LocalBackend>;

/// The backend of one rank of a group of threads.
pub struct LocalBackend {
    membership: Membership,
    shared: Arc<RankShared>,
    delay: Option<Delay>,
}

impl LocalBackend {
    fn group(&self) -> &Group {
        &self.membership.group
    }
}

impl Backend for LocalBackend {
    const NAME: &'static str = world::BACKEND;
    const SHARES_GATHERS: bool = true;

    fn name(&self) -> &Arc<str> {
        &self.membership.group.name
    }

    fn world_ranks(&self) -> &[usize] {
        &self.membership.group.world_ranks
    }

    fn rank(&self) -> usize {
        self.membership.rank
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
        self.group().issued(self.membership.rank, site.sequence);
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
        let exchange = Exchange { group: self.group(), delay: self.delay.as_ref(), site };
        exchange.delay_entry();
        let (input, transfer) = Transfer::prepare(payload, site.rank);
        // A deposit must have been written before the peers read it.
        #[cfg(feature = "cube")]
        if let Some(memory) = input.as_ref().and_then(|input| input.device())
            && let Err(reason) = device::synchronize(memory)
        {
            return Err(self.give_up(site, &format!("its GPU failed: {reason}")));
        }
        self.group().enter(site, call, input)?;
        let result = transfer.run(&exchange);
        if let Err(error) = &result {
            // Arguments were checked, so this is a bug here; the peers must not wait for this rank.
            self.crash(&error.to_string());
        }
        self.group().close(site);
        result
    }

    fn split(&self, site: &CallSite, call: Call) -> Result<Option<LocalBackend>, CommError> {
        Exchange { group: self.group(), delay: self.delay.as_ref(), site }.delay_entry();
        self.group().enter(site, call, None)?;
        let membership = self.group().take_membership(site);
        self.group().close(site);
        let (shared, delay) = (Arc::clone(&self.shared), self.delay.clone());
        Ok(membership.map(|membership| LocalBackend { membership, shared, delay }))
    }

    fn give_up(&self, site: &CallSite, reason: &str) -> CommError {
        self.group().give_up(site, reason)
    }

    fn time_out(&self, site: &CallSite, waited: Duration) -> CommError {
        self.group().time_out(site, waited)
    }

    fn crash(&self, reason: &str) {
        self.group().crash(self.membership.rank, reason);
    }

    fn cause(&self, site: &CallSite) -> Option<CommError> {
        self.group().cause(site)
    }

    fn abort(&self, reason: &str) {
        let group = self.group();
        group.world.abort(group.abort_by(self.membership.rank, reason));
    }

    fn leave(&self) {
        self.membership.leave();
    }

    fn verdict(&self) -> Option<Verdict> {
        self.group().world.verdict()
    }
}
