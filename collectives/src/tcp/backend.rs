//! The backend whose ranks are processes connected by TCP.

use super::mesh::{self, World};
use super::message::{GroupName, Trouble, TroubleKind};
use super::options::Ring;
use super::transfer::{Transfer, equal_chunks};
use super::wire::{Stop, Wire};
use crate::backend::{AskAll, Backend, GroupControl, GroupRank, RankShared, empty, number_nodes};
use crate::buffer::Buffer;
use crate::call::{Call, CallSite, SplitKey, partition};
use crate::error::{Abort, Cause, CommError};
use crate::operation::Operation;
use crate::payload::Payload;
use crate::process_group::ProcessGroup;
use crate::sync::lock;
use crate::verdict::Verdict;
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A rank in its own process, connected to the other ranks by TCP.
pub type TcpCommunicator = ProcessGroup<TcpBackend>;

/// One rank's backend in a group of processes.
pub struct TcpBackend {
    world: Arc<World>,
    group: GroupName,
    identity: GroupRank,
    wire: Mutex<Wire>,
    ring: bool,
}

impl TcpBackend {
    pub(super) fn new(
        world: Arc<World>,
        shared: Arc<RankShared>,
        group: GroupName,
        rank: usize,
        wire: Wire,
    ) -> TcpBackend {
        world.control.register(group.number, wire.waker());
        let ring = match world.options.ring {
            Ring::Always => true,
            Ring::Never => false,
            Ring::Auto => has_busy_links(&nodes(&world, &group)),
        };
        let (name, world_ranks) = (group.name.as_str().into(), group.ranks.clone());
        let identity = GroupRank { name, rank, world_ranks, shared };
        TcpBackend { world, group, identity, wire: Mutex::new(wire), ring }
    }

    fn report(&self, site: &CallSite, kind: TroubleKind) -> Cause {
        self.world.control.report(Trouble { group: self.group.clone(), site: site.clone(), kind })
    }

    fn failure(&self) -> Option<Cause> {
        self.world.control.cause(self.group.number)
    }

    fn investigate(&self, site: &CallSite, stop: Stop) -> CommError {
        let cause = match stop {
            Stop::Mismatch => self.report(site, TroubleKind::Mismatch),
            Stop::Lost { peer, left, reason } => self.report(site, TroubleKind::Lost { peer, left, reason }),
            Stop::Failed => self.failure().unwrap_or_else(|| {
                let abort = self.identity.abort("it cannot wait for its connections");
                self.world.control.abort(abort.clone());
                self.failure().unwrap_or(Cause::Abort(abort))
            }),
        };
        cause.error(site, None)
    }

    fn run(&self, site: &CallSite, call: &Call, payload: Payload) -> Result<Buffer, Stop> {
        let mut wire = lock(&self.wire);
        wire.begin(site.sequence, digest(call, self.ring));
        let mut transfer = Transfer { wire: &mut wire, rank: site.rank, ring: self.ring };
        let world_size = self.group.ranks.len();
        match payload {
            Payload::AllGather { input, mut output } => {
                let chunks = equal_chunks(input.size_in_bytes(), world_size);
                transfer.all_gather(input.as_bytes(), output.as_bytes_mut(), &chunks)?;
                Ok(output)
            }
            Payload::ReduceScatter { input, mut output } => {
                let chunks = equal_chunks(output.size_in_bytes(), world_size);
                let dtype = output.dtype();
                transfer.reduce_scatter(dtype, input.as_bytes(), output.as_bytes_mut(), &chunks)?;
                Ok(output)
            }
            Payload::AllReduce { mut buffer } => {
                transfer.all_reduce(&mut buffer)?;
                Ok(buffer)
            }
            Payload::Broadcast { mut buffer, root } => {
                transfer.broadcast(buffer.as_bytes_mut(), root)?;
                Ok(buffer)
            }
            Payload::Nothing => {
                transfer.meet()?;
                Ok(empty())
            }
        }
    }

    /// Fails if the group has failed or the arguments are invalid, before this rank enters the operation.
    fn check(&self, site: &CallSite, call: &Call) -> Result<(), CommError> {
        // This rank has not entered the operation, so no rank can have completed it.
        if let Some(cause) = self.failure() {
            return Err(cause.error(site, call.problem));
        }
        let Some(problem) = call.problem else { return Ok(()) };
        self.report(site, TroubleKind::Mismatch);
        Err(CommError::Invalid { site: site.clone(), problem })
    }

    fn run_split(&self, site: &CallSite, call: &Call) -> Result<Option<TcpBackend>, Stop> {
        let mut wire = lock(&self.wire);
        wire.begin(site.sequence, digest(call, self.ring));
        let mut transfer = Transfer { wire: &mut wire, rank: site.rank, ring: false };
        let Some(SplitKey { color, key }) = call.split_key else { return Err(Stop::Mismatch) };
        let words = [color.map_or(u64::MAX, u64::from), key as u64, hash(&call.label.scope)];
        let own: [u8; REQUEST] = bytemuck::cast(words.map(u64::to_le));
        let chunks = equal_chunks(REQUEST, self.group.ranks.len());
        let mut all = vec![[0; REQUEST]; chunks.len()];
        transfer.all_gather(&own, all.as_flattened_mut(), &chunks)?;
        let requests = all.into_iter().map(|bytes| bytemuck::cast::<_, [u64; 3]>(bytes).map(u64::from_le));
        let mut names: BTreeMap<u32, u64> = BTreeMap::new();
        let mut keys = Vec::new();
        for [color, key, name] in requests {
            let color = u32::try_from(color).ok();
            if color.is_some_and(|color| *names.entry(color).or_insert(name) != name) {
                return Err(Stop::Mismatch);
            }
            keys.push(Some(SplitKey { color, key: key as i64 }));
        }
        let Some(color) = color else { return Ok(None) };
        let order = partition(keys.into_iter()).remove(&color).unwrap_or_default();
        let Some(rank) = order.iter().position(|rank| *rank == site.rank) else { return Err(Stop::Mismatch) };
        let ranks = order.iter().map(|rank| self.group.ranks[*rank]).collect();
        let number = hash(&(self.group.number, site.sequence, color));
        let group = GroupName { number, name: call.label.scope.to_string(), ranks };
        let until = Instant::now() + self.world.options.timeout;
        let wire = mesh::connect(&self.world, &group, rank, until).map_err(|error| {
            let reason = format!("it cannot connect to group \"{}\": {error}", group.name);
            self.abort(&reason);
            Stop::Failed
        })?;
        let (world, shared) = (Arc::clone(&self.world), Arc::clone(&self.identity.shared));
        Ok(Some(TcpBackend::new(world, shared, group, rank, wire)))
    }
}

impl GroupControl for TcpBackend {
    fn identity(&self) -> &GroupRank {
        &self.identity
    }

    fn cause(&self, site: &CallSite) -> Option<CommError> {
        self.failure().map(|cause| cause.error(site, None))
    }

    fn fail(&self, abort: Abort) {
        self.world.control.fail_here(self.group.number, abort);
    }

    fn time_out(&self, site: &CallSite, waited: Duration) -> CommError {
        self.report(site, TroubleKind::TimedOut { waited }).error(site, None)
    }

    fn abort(&self, reason: &str) {
        self.world.control.abort(self.identity.abort(reason));
    }

    fn hold(&self, is_held: bool) {
        self.world.control.hold(is_held);
    }
}

impl Backend for TcpBackend {
    const NAME: &'static str = "tcp";
    const SHARES_HOLDS: bool = true;

    fn nodes(&self) -> Vec<usize> {
        nodes(&self.world, &self.group)
    }

    fn issued(&self, _: &CallSite, _: &Call) {
        self.world.control.issued();
    }

    fn execute(&self, site: &CallSite, call: Call, payload: Payload) -> Result<Buffer, CommError> {
        self.check(site, &call)?;
        self.run(site, &call, payload).map_err(|stop| self.investigate(site, stop))
    }

    fn split(&self, site: &CallSite, call: Call) -> Result<Option<TcpBackend>, CommError> {
        self.check(site, &call)?;
        self.run_split(site, &call).map_err(|stop| self.investigate(site, stop))
    }

    fn crash(&self, reason: &str) {
        self.abort(reason);
    }

    fn leave(&self) {
        self.fail(self.identity.left());
        lock(&self.wire).leave();
    }

    fn verdict(&self) -> Option<Verdict> {
        self.world.control.verdict()
    }

    fn ask_all(&self) -> Option<AskAll> {
        self.world.control.ask_all()
    }
}

fn nodes(world: &World, group: &GroupName) -> Vec<usize> {
    number_nodes(group.ranks.iter().map(|rank| world.ranks[*rank].node.as_str()))
}

/// Returns whether direct transfers would send bytes repeatedly over a link between machines: several machines, one of
/// them with several ranks.
fn has_busy_links(nodes: &[usize]) -> bool {
    let machines = nodes.iter().max().map_or(0, |last| last + 1);
    machines > 1 && nodes.len() > machines
}

const REQUEST: usize = 24;

fn digest(call: &Call, ring: bool) -> u64 {
    let scope = (call.operation != Operation::Split).then_some(&call.label.scope);
    hash(&(call.operation, call.dtype, call.count, call.location, call.root, scope, ring))
}

/// The result is equal in every process of a job.
fn hash(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}
