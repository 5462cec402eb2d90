//! The backend whose ranks are MPI processes.

use super::exchange::exchange;
use super::group::Group;
use super::message::{Failure, Notice};
use super::runtime::Runtime;
use super::world::BACKEND;
use crate::backend::{Backend, GroupControl, GroupRank, empty, number_nodes};
use crate::buffer::Buffer;
use crate::call::{Call, CallSite};
use crate::error::{Abort, Cause, CommError};
use crate::payload::Payload;
use crate::reduce::{chunk_range, sum_into};
use crate::verdict::Verdict;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The backend of one rank of a group of MPI processes.
pub struct MpiBackend {
    group: Arc<Group>,
    left: AtomicBool,
    runtime: Arc<Runtime>,
}

impl MpiBackend {
    pub(super) fn new(group: Arc<Group>, runtime: Arc<Runtime>) -> MpiBackend {
        runtime.inbox.register(&group);
        MpiBackend { group, left: AtomicBool::new(false), runtime }
    }

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
                let lengths = (0..size).map(|rank| chunk_range(buffer.len(), size, rank).len());
                let mut lengths: Vec<usize> = lengths.collect();
                let mut chunk = Buffer::zeros(buffer.dtype(), lengths[site.rank]);
                self.reduce(&buffer, &mut chunk, &lengths, site)?;
                lengths.iter_mut().for_each(|length| *length *= buffer.dtype().size());
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
            Payload::Nothing => Ok(empty()),
        }
    }

    /// Returns the other ranks, starting after `rank`, so that not all ranks send to the same peer first.
    fn peers(&self, rank: usize) -> impl Iterator<Item = usize> + use<> {
        let size = self.group.world_size();
        (1..size).map(move |step| (rank + step) % size)
    }

    fn gather(&self, own: &[u8], mut output: &mut [u8], lengths: &[usize]) {
        let rank = self.group.identity.rank;
        let mut receives = Vec::new();
        for (peer, length) in lengths.iter().enumerate() {
            let (chunk, rest) = output.split_at_mut(*length);
            output = rest;
            if peer == rank {
                chunk.copy_from_slice(own);
            } else {
                receives.push((peer, chunk));
            }
        }
        let sends: Vec<_> = self.peers(rank).map(|peer| (peer, own)).collect();
        exchange(&self.group, &sends, receives);
    }

    /// Sets `output` to this rank's chunk of the sum, added in rank order. `lengths`: number of elements of each chunk.
    fn reduce(
        &self,
        input: &Buffer,
        output: &mut Buffer,
        lengths: &[usize],
        site: &CallSite,
    ) -> Result<(), CommError> {
        let rank = self.group.identity.rank;
        let mut rest = input.as_bytes();
        let chunk = |length: &usize| {
            let (chunk, next) = rest.split_at(length * input.dtype().size());
            rest = next;
            chunk
        };
        let chunks: Vec<&[u8]> = lengths.iter().map(chunk).collect();
        let mut addends: Vec<Buffer> =
            lengths.iter().map(|_| Buffer::zeros(input.dtype(), output.len())).collect();
        addends[rank].as_bytes_mut().copy_from_slice(chunks[rank]);
        let addends_of_peers = addends.iter_mut().enumerate().filter(|(peer, _)| *peer != rank);
        let receives = addends_of_peers.map(|(peer, addend)| (peer, addend.as_bytes_mut())).collect();
        let sends: Vec<_> = self.peers(rank).map(|peer| (peer, chunks[peer])).collect();
        exchange(&self.group, &sends, receives);
        let addends: Vec<Arc<Buffer>> = addends.into_iter().map(Arc::new).collect();
        let invalid = |problem| CommError::Invalid { site: site.clone(), problem };
        sum_into(output, &addends, 0).map_err(invalid)
    }
}

impl GroupControl for MpiBackend {
    fn identity(&self) -> &GroupRank {
        &self.group.identity
    }

    fn cause(&self, site: &CallSite) -> Option<CommError> {
        self.group.failure().map(|failure| failure.cause.error(site, None))
    }

    fn fail(&self, abort: Abort) {
        let _ = self.group.give_up(Cause::Abort(abort));
    }

    fn give_up(&self, site: &CallSite, reason: &str) -> CommError {
        let cause = Cause::Abort(self.group.identity.abort(reason));
        self.group.give_up(cause).error(site, None)
    }

    fn time_out(&self, site: &CallSite, waited: Duration) -> CommError {
        self.cause(site).unwrap_or_else(|| {
            let verdict = self.runtime.inbox.diagnose(&self.group, site.sequence);
            self.group.time_out(site, waited, verdict)
        })
    }

    fn abort(&self, reason: &str) {
        let cause = Cause::Abort(self.group.identity.abort(reason));
        self.runtime.inbox.abort(&self.group.world, Failure { cause, everywhere: true });
    }
}

impl Backend for MpiBackend {
    const NAME: &'static str = BACKEND;

    fn nodes(&self) -> Vec<usize> {
        let names = &self.runtime.inbox.outbox.node_names;
        number_nodes(self.group.identity.world_ranks.iter().map(|rank| names[*rank].as_str()))
    }

    fn issued(&self, site: &CallSite, call: &Call) {
        let (sequence, rank, call) = (site.sequence, site.rank, call.clone());
        self.group.tell_first(Notice::Called { sequence, rank, call });
    }

    fn execute(&self, site: &CallSite, call: Call, payload: Payload) -> Result<Buffer, CommError> {
        self.group.enter(site, call.problem)?;
        let result = self.transfer(site, payload);
        if let Err(error) = &result {
            // The arguments were checked, so this is a bug; the peers must not wait for this rank.
            self.crash(&error.to_string());
        }
        result
    }

    fn split(&self, site: &CallSite, call: Call) -> Result<Option<MpiBackend>, CommError> {
        let (shared, outbox) = (&self.group.identity.shared, &self.runtime.inbox.outbox);
        let groups = self.group.enter(site, call.problem)?;
        Ok(groups.into_iter().find(|new| new.world_ranks.contains(&shared.world_rank)).map(|new| {
            let world = Arc::clone(&self.group.world);
            let group = Group::new(new.number, &new.name, new.world_ranks, shared, outbox, world);
            MpiBackend::new(group, Arc::clone(&self.runtime))
        }))
    }

    fn leave(&self) {
        if !self.left.swap(true, Ordering::Relaxed) {
            self.fail(self.group.identity.left());
        }
    }

    fn verdict(&self) -> Option<Verdict> {
        self.group.world.verdict()
    }
}

impl Drop for MpiBackend {
    fn drop(&mut self) {
        self.leave();
        self.runtime.inbox.close(self.group.number);
    }
}
