//! The backend whose ranks are MPI processes.

use super::exchange::exchange;
use super::group::Group;
use super::message::Notice;
use super::runtime::Runtime;
use super::world::BACKEND;
use crate::backend::{Backend, Payload, RankShared, empty, number_nodes};
use crate::buffer::Buffer;
use crate::call::{Call, CallSite};
use crate::error::CommError;

use crate::reduce::{chunk_range, sum_into};
use crate::verdict::Verdict;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The backend of one rank of a group of MPI processes.
pub struct MpiBackend {
    group: Arc<Group>,
    shared: Arc<RankShared>,
    left: AtomicBool,
    runtime: Arc<Runtime>,
}

impl MpiBackend {
    pub(super) fn new(group: Arc<Group>, shared: Arc<RankShared>, runtime: Arc<Runtime>) -> MpiBackend {
        runtime.inbox().register(&group);
        MpiBackend { group, shared, left: AtomicBool::new(false), runtime }
    }

    /// Moves the data. All other ranks of the group do the same now.
    fn transfer(&self, site: &CallSite, payload: Payload) -> Result<Buffer, CommError> {
        match payload {
            Payload::AllGather { input, mut output } => {
                let lengths = vec![input.size_in_bytes(); self.group.world_size()];
                self.gather(input.as_bytes(), output.as_bytes_mut(), &lengths);
                Ok(output)
            }
            Payload::ReduceScatter { input, mut output } => {
                let lengths = vec![output.len(); self.group.world_size()];
                self.reduce(&input, &mut output, &lengths, site)?;
                Ok(output)
            }
            Payload::AllReduce { mut buffer } => {
                let size = self.group.world_size();
                let lengths: Vec<usize> =
                    (0..size).map(|rank| chunk_range(buffer.len(), size, rank).len()).collect();
                let mut chunk = Buffer::zeros(buffer.dtype(), lengths[site.rank]);
                self.reduce(&buffer, &mut chunk, &lengths, site)?;
                let element = buffer.dtype().size();
                let lengths: Vec<usize> = lengths.iter().map(|length| length * element).collect();
                self.gather(chunk.as_bytes(), buffer.as_bytes_mut(), &lengths);
                Ok(buffer)
            }
            Payload::Broadcast { mut buffer, root } => {
                if site.rank == root {
                    let sends: Vec<_> = self.peers(site.rank).map(|peer| (peer, buffer.as_bytes())).collect();
                    exchange(&self.group, &sends, Vec::new());
                } else {
                    exchange(&self.group, &[], vec![(root, buffer.as_bytes_mut())]);
                }
                Ok(buffer)
            }
            // A barrier is complete once all ranks have entered it.
            Payload::Nothing => Ok(empty()),
        }
    }

    /// The other ranks, beginning after `rank`, so that not all ranks send to the same one first.
    fn peers(&self, rank: usize) -> impl Iterator<Item = usize> + use<> {
        let size = self.group.world_size();
        (1..size).map(move |step| (rank + step) % size)
    }

    /// Fills `output` with the chunks of all ranks, whose `lengths` are in bytes.
    fn gather(&self, own: &[u8], output: &mut [u8], lengths: &[usize]) {
        let rank = self.group.rank;
        let mut receives = Vec::new();
        for (peer, slot) in split(output, lengths).into_iter().enumerate() {
            if peer == rank {
                slot.copy_from_slice(own);
            } else {
                receives.push((peer, slot));
            }
        }
        let sends: Vec<_> = self.peers(rank).map(|peer| (peer, own)).collect();
        exchange(&self.group, &sends, receives);
    }

    /// Sets `output` to this rank's chunk of the sum of all inputs. `lengths` are those of all chunks, in
    /// elements. Adds in the order of ranks.
    fn reduce(
        &self,
        input: &Buffer,
        output: &mut Buffer,
        lengths: &[usize],
        site: &CallSite,
    ) -> Result<(), CommError> {
        let rank = self.group.rank;
        let element = input.dtype().size();
        let mut rest = input.as_bytes();
        let mut chunks = Vec::with_capacity(lengths.len());
        for length in lengths {
            let (chunk, next) = rest.split_at(length * element);
            chunks.push(chunk);
            rest = next;
        }
        let mut addends: Vec<Buffer> =
            lengths.iter().map(|_| Buffer::zeros(input.dtype(), output.len())).collect();
        let mut receives = Vec::new();
        for (peer, addend) in addends.iter_mut().enumerate() {
            if peer == rank {
                addend.as_bytes_mut().copy_from_slice(chunks[rank]);
            } else {
                receives.push((peer, addend.as_bytes_mut()));
            }
        }
        let sends: Vec<_> = self.peers(rank).map(|peer| (peer, chunks[peer])).collect();
        exchange(&self.group, &sends, receives);
        let addends: Vec<Arc<Buffer>> = addends.into_iter().map(Arc::new).collect();
        sum_into(output, &addends, 0).map_err(|problem| CommError::invalid(site, problem))
    }
}

/// Divides `bytes` into consecutive slots.
fn split<'a>(mut bytes: &'a mut [u8], lengths: &[usize]) -> Vec<&'a mut [u8]> {
    let mut slots = Vec::with_capacity(lengths.len());
    for length in lengths {
        let (slot, rest) = bytes.split_at_mut(*length);
        slots.push(slot);
        bytes = rest;
    }
    slots
}

impl Backend for MpiBackend {
    const NAME: &'static str = BACKEND;

    fn name(&self) -> &Arc<str> {
        &self.group.name
    }

    fn world_ranks(&self) -> &[usize] {
        &self.group.world_ranks
    }

    fn rank(&self) -> usize {
        self.group.rank
    }

    fn shared(&self) -> &Arc<RankShared> {
        &self.shared
    }

    fn nodes(&self) -> Vec<usize> {
        let outbox = self.runtime.outbox();
        number_nodes(self.group.world_ranks.iter().map(|rank| outbox.node_name(*rank)))
    }

    fn node_name(&self) -> String {
        self.runtime.outbox().own_node().to_owned()
    }

    fn issued(&self, site: &CallSite, call: &Call) {
        let (sequence, rank, call) = (site.sequence, site.rank, call.clone());
        self.group.tell_first(Notice::Called { sequence, rank, call });
    }

    fn execute(&self, site: &CallSite, call: Call, payload: Payload) -> Result<Buffer, CommError> {
        self.group.enter(site, call.problem)?;
        let result = self.transfer(site, payload);
        if let Err(error) = &result {
            // Arguments were checked, so this is a bug here; the peers must not wait for us.
            self.crash(&error.to_string());
        }
        result
    }

    fn split(&self, site: &CallSite, call: Call) -> Result<Option<MpiBackend>, CommError> {
        let (own, outbox) = (self.shared.world_rank, self.runtime.outbox());
        let groups = self.group.enter(site, call.problem)?;
        Ok(groups.into_iter().find(|new| new.world_ranks.contains(&own)).map(|new| {
            let world = Arc::clone(&self.group.world);
            let group = Group::new(new.number, new.name.into(), new.world_ranks, outbox, world);
            MpiBackend::new(group, Arc::clone(&self.shared), Arc::clone(&self.runtime))
        }))
    }

    fn give_up(&self, site: &CallSite, reason: &str) -> CommError {
        self.group.give_up(reason).error(site)
    }

    fn time_out(&self, site: &CallSite, waited: Duration) -> CommError {
        if let Some(cause) = self.group.failure() {
            return cause.error(site);
        }
        let verdict = self.runtime.inbox().diagnose(&self.group, site.sequence);
        self.group.time_out(site, waited, verdict)
    }

    fn crash(&self, reason: &str) {
        let _ = self.group.give_up(reason);
    }

    fn cause(&self, site: &CallSite) -> Option<CommError> {
        self.group.failure().map(|cause| cause.error(site))
    }

    fn abort(&self, reason: &str) {
        let cause = self.group.abort_here(reason, true);
        self.runtime.inbox().abort(&self.group.world, cause);
    }

    fn leave(&self) {
        if !self.left.swap(true, Ordering::Relaxed) {
            let _ = self.group.give_up(&format!("rank {} left the group", self.group.rank));
        }
    }

    fn verdict(&self) -> Option<Verdict> {
        self.group.world.verdict()
    }
}

impl Drop for MpiBackend {
    fn drop(&mut self) {
        self.leave();
        self.runtime.inbox().close(self.group.number);
    }
}
