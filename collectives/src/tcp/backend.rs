//! The backend whose ranks are processes connected by TCP.

use super::mesh;
use super::message::{Cause, GroupName, GroupNumber, Site, Trouble};
use super::options::Ring;
use super::transfer::Transfer;
use super::wire::{Stop, Wire};
use super::world::World;
use crate::backend::{Backend, Payload, RankShared, empty, number_nodes};
use crate::buffer::Buffer;
use crate::call::{Call, CallSite};
use crate::error::CommError;
use crate::operation::Operation;
use crate::process_group::ProcessGroup;
use crate::sync::lock;
use crate::verdict::Verdict;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A rank that is a process of its own, connected to the others by TCP.
pub type TcpCommunicator = ProcessGroup<TcpBackend>;

/// The backend of one rank of a group of processes.
pub struct TcpBackend {
    world: Arc<World>,
    shared: Arc<RankShared>,
    group: GroupName,
    name: Arc<str>,
    rank: usize,
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
        let ring = match world.ring {
            Ring::Always => true,
            Ring::Never => false,
            Ring::Auto => has_busy_links(&nodes(&world, &group)),
        };
        let name = Arc::from(group.name.as_str());
        TcpBackend { world, shared, group, name, rank, wire: Mutex::new(wire), ring }
    }

    fn site(&self, site: &CallSite) -> Site {
        Site {
            group: self.group.clone(),
            rank: site.rank,
            sequence: site.sequence,
            operation: site.operation,
            label: site.label.clone(),
        }
    }

    fn cause(&self) -> Option<Cause> {
        self.world.control.cause(self.group.number)
    }

    /// Lets the rendezvous find the cause of a stopped operation.
    fn investigate(&self, at: &CallSite, stop: Stop) -> Cause {
        let site = self.site(at);
        let trouble = match stop {
            Stop::Failed => match self.cause() {
                Some(cause) => return cause,
                // Only if the system cannot wait for sockets any more.
                None => {
                    let reason = "it cannot wait for its connections";
                    self.world.control.abort(&self.group, self.rank, reason);
                    return self.cause().unwrap_or_else(|| self.own_abort(reason));
                }
            },
            Stop::Mismatch => Trouble::Mismatch { site: site.clone() },
            Stop::Lost { peer, left, reason } => Trouble::Lost { site: site.clone(), peer, left, reason },
        };
        self.world.control.report(&site, trouble)
    }

    fn own_abort(&self, reason: &str) -> Cause {
        Cause::Abort {
            origin: self.group.name.clone(),
            rank: self.rank,
            world_rank: self.shared.world_rank,
            reason: reason.to_owned(),
        }
    }

    fn run(&self, site: &CallSite, call: &Call, payload: Payload) -> Result<Buffer, Stop> {
        let mut wire = lock(&self.wire);
        wire.begin(site.sequence, digest(call, self.ring));
        let mut transfer = Transfer { wire: &mut wire, rank: self.rank, ring: self.ring };
        match payload {
            Payload::AllGather { input, mut output } => {
                let slots = self.slots(input.size_in_bytes());
                transfer.all_gather(input.as_bytes(), output.as_bytes_mut(), &slots)?;
                Ok(output)
            }
            Payload::ReduceScatter { input, mut output } => {
                let slots = self.slots(output.size_in_bytes());
                let dtype = output.dtype();
                transfer.reduce_scatter(dtype, input.as_bytes(), output.as_bytes_mut(), &slots)?;
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

    /// Byte ranges of the ranks' slots of `size` bytes.
    fn slots(&self, size: usize) -> Vec<Range<usize>> {
        (0..self.group.ranks.len()).map(|rank| rank * size..(rank + 1) * size).collect()
    }

    /// Fails a call before it enters the operation, if the group has failed or its arguments are wrong.
    fn check(&self, site: &CallSite, call: &Call) -> Result<(), CommError> {
        // This rank has not entered the operation, so it cannot have completed on any rank.
        if let Some(cause) = self.cause() {
            return Err(match (&cause, call.problem) {
                // Others have found this very call to differ before this rank came to it.
                (Cause::Mismatch { sequence, .. }, Some(problem)) if *sequence == site.sequence => {
                    CommError::invalid(site, problem)
                }
                _ => cause.error(site),
            });
        }
        let Some(problem) = call.problem else { return Ok(()) };
        let site_here = self.site(site);
        let trouble = Trouble::Mismatch { site: site_here.clone() };
        self.world.control.report(&site_here, trouble);
        Err(CommError::invalid(site, problem))
    }

    /// Exchanges colors and keys, and connects with the ranks of the same color.
    fn run_split(&self, site: &CallSite, call: &Call) -> Result<Option<TcpBackend>, Stop> {
        let mut wire = lock(&self.wire);
        wire.begin(site.sequence, digest(call, self.ring));
        let mut transfer = Transfer { wire: &mut wire, rank: self.rank, ring: false };
        let own = SplitRequest::of(call);
        let slots = self.slots(REQUEST);
        let mut all = vec![0; REQUEST * slots.len()];
        transfer.all_gather(&own.encode(), &mut all, &slots)?;
        let requests: Vec<SplitRequest> = all.chunks_exact(REQUEST).map(SplitRequest::decode).collect();
        let mut names: BTreeMap<u32, u64> = BTreeMap::new();
        for request in &requests {
            let Some(color) = request.color else { continue };
            if *names.entry(color).or_insert(request.name) != request.name {
                return Err(Stop::Mismatch);
            }
        }
        let Some(color) = own.color else { return Ok(None) };
        let mut order: Vec<(i64, usize)> = requests
            .iter()
            .enumerate()
            .filter(|(_, request)| request.color == Some(color))
            .map(|(rank, request)| (request.key, rank))
            .collect();
        order.sort_unstable();
        let ranks: Vec<usize> = order.iter().map(|(_, rank)| self.group.ranks[*rank]).collect();
        let number = fnv(&[self.group.number, site.sequence, u64::from(color)]);
        let group = GroupName { number, name: call.label.scope.to_string(), ranks };
        let Some(rank) = group.ranks.iter().position(|r| *r == self.shared.world_rank) else {
            return Err(Stop::Mismatch);
        };
        let until = Instant::now() + self.world.timeout;
        let wire = mesh::connect(&self.world, &group, rank, until).map_err(|error| {
            let reason = format!("it cannot connect to group \"{}\": {error}", group.name);
            self.world.control.abort(&self.group, self.rank, &reason);
            Stop::Failed
        })?;
        Ok(Some(TcpBackend::new(Arc::clone(&self.world), Arc::clone(&self.shared), group, rank, wire)))
    }
}

impl Backend for TcpBackend {
    const NAME: &'static str = "tcp";

    fn name(&self) -> &Arc<str> {
        &self.name
    }

    fn world_ranks(&self) -> &[usize] {
        &self.group.ranks
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn shared(&self) -> &Arc<RankShared> {
        &self.shared
    }

    fn nodes(&self) -> Vec<usize> {
        nodes(&self.world, &self.group)
    }

    fn node_name(&self) -> String {
        self.world.node.clone()
    }

    fn issued(&self, _: &CallSite, _: &Call) {
        self.world.control.issued();
    }

    fn execute(&self, site: &CallSite, call: Call, payload: Payload) -> Result<Buffer, CommError> {
        self.check(site, &call)?;
        self.run(site, &call, payload).map_err(|stop| self.investigate(site, stop).error(site))
    }

    fn split(&self, site: &CallSite, call: Call) -> Result<Option<TcpBackend>, CommError> {
        self.check(site, &call)?;
        self.run_split(site, &call).map_err(|stop| self.investigate(site, stop).error(site))
    }

    fn give_up(&self, site: &CallSite, reason: &str) -> CommError {
        let cause = self.own_abort(reason);
        self.world.control.fail_here(self.group.number, cause.clone());
        self.cause().unwrap_or(cause).error(site)
    }

    fn time_out(&self, site: &CallSite, waited: Duration) -> CommError {
        let here = self.site(site);
        let trouble = Trouble::TimedOut { site: here.clone(), waited };
        self.world.control.report(&here, trouble).error(site)
    }

    fn crash(&self, reason: &str) {
        self.world.control.abort(&self.group, self.rank, reason);
    }

    fn cause(&self, site: &CallSite) -> Option<CommError> {
        TcpBackend::cause(self).map(|cause| cause.error(site))
    }

    fn abort(&self, reason: &str) {
        self.world.control.abort(&self.group, self.rank, reason);
    }

    fn leave(&self) {
        let reason = format!("rank {} left the group", self.rank);
        self.world.control.fail_here(self.group.number, self.own_abort(&reason));
        // The worker releases the wire once it learns of the failure.
        lock(&self.wire).leave();
    }

    fn verdict(&self) -> Option<Verdict> {
        self.world.control.verdict()
    }
}

fn nodes(world: &World, group: &GroupName) -> Vec<usize> {
    number_nodes(group.ranks.iter().map(|rank| world.members[*rank].node.as_str()))
}

/// Whether direct transfers would send the same bytes more than once over a link between machines. That is so
/// if there are several machines, and several ranks on one of them.
fn has_busy_links(nodes: &[usize]) -> bool {
    let machines = nodes.iter().max().map_or(0, |last| last + 1);
    machines > 1 && nodes.len() > machines
}

/// What ranks exchange in a split: color, key and a hash of the name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SplitRequest {
    color: Option<u32>,
    key: i64,
    name: u64,
}

/// Bytes of a split request.
const REQUEST: usize = 24;

impl SplitRequest {
    fn of(call: &Call) -> SplitRequest {
        let split = call.split_key;
        SplitRequest {
            color: split.and_then(|split| split.color),
            key: split.map_or(0, |split| split.key),
            name: fnv_bytes(call.label.scope.as_bytes()),
        }
    }

    fn encode(self) -> [u8; REQUEST] {
        // No color is a number that no color can be.
        let color = self.color.map_or(u64::MAX, u64::from);
        let mut bytes = [0; REQUEST];
        bytes[..8].copy_from_slice(&color.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.key.to_le_bytes());
        bytes[16..].copy_from_slice(&self.name.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> SplitRequest {
        let word = |index: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[index * 8..index * 8 + 8]);
            word
        };
        SplitRequest {
            color: u32::try_from(u64::from_le_bytes(word(0))).ok(),
            key: i64::from_le_bytes(word(1)),
            name: u64::from_le_bytes(word(2)),
        }
    }
}

/// Hashes everything that ranks must agree on before data moves.
fn digest(call: &Call, ring: bool) -> u64 {
    let scope = match call.operation {
        // Ranks that end up in different groups may name them differently.
        Operation::Split => 0,
        _ => fnv_bytes(call.label.scope.as_bytes()),
    };
    fnv(&[
        call.operation as u64,
        call.dtype as u64,
        call.count as u64,
        call.location as u64,
        call.root.map_or(u64::MAX, |root| root as u64),
        scope,
        u64::from(ring),
    ])
}

/// FNV-1a (Fowler, Noll and Vo) over words.
fn fnv(words: &[u64]) -> GroupNumber {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    fnv_bytes(&bytes)
}

fn fnv_bytes(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}
