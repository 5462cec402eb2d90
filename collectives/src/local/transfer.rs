//! How data moves between threads: every rank copies or sums straight from the buffers of its peers.

use super::delay::Delay;
#[cfg(feature = "cube")]
use super::device;
use super::group::Group;
use crate::backend::{Payload, empty};
use crate::buffer::Buffer;
use crate::call::CallSite;
use crate::error::CommError;
use crate::reduce::{chunk_range, sum_into};
use std::sync::Arc;
use std::thread;

/// One rank's part in an operation of its group.
#[derive(Clone, Copy)]
pub(super) struct Exchange<'a> {
    pub(super) group: &'a Group,
    pub(super) delay: Option<&'a Delay>,
    pub(super) site: &'a CallSite,
}

impl Exchange<'_> {
    /// The error of a transfer that this rank cannot do.
    fn failed(&self, reason: &str) -> CommError {
        self.group.abort_by(self.site.rank, reason).error(self.site)
    }

    /// Delays the entry into the operation if random delays are on, for as long as the group has not failed.
    pub(super) fn delay_entry(&self) {
        if let Some(delay) = self.delay {
            self.group.sleep(delay.draw(self.group.world_ranks[self.site.rank], self.site, 0));
        }
    }

    /// Delays the transfer if random delays are on.
    fn delay_transfer(&self, point: u64) {
        if let Some(delay) = self.delay {
            thread::sleep(delay.draw(self.group.world_ranks[self.site.rank], self.site, point));
        }
    }

    /// The buffers that the peers have deposited in `round`.
    fn deposits(&self, round: usize) -> Vec<Arc<Buffer>> {
        self.group.deposits(self.site, round)
    }

    /// Takes back what this rank has deposited in `round`, which no peer reads any more.
    fn take_back(&self, round: usize) -> Buffer {
        self.group.take_back(self.site, round).map_or_else(empty, Arc::unwrap_or_clone)
    }

    /// Waits until all ranks have arrived at `round`, the last use of the deposits before it.
    fn arrive(&self, round: usize, deposit: Option<Arc<Buffer>>) -> Result<(), CommError> {
        self.delay_transfer(round as u64 + 1);
        self.group.arrive(self.site, round, deposit)
    }
}

/// What is left of the payload once the input has been deposited.
pub(super) enum Transfer {
    AllGather {
        output: Buffer,
    },
    ReduceScatter {
        output: Buffer,
    },
    AllReduce,
    /// On the root of a broadcast, whose buffer is deposited.
    Send,
    /// On the other ranks of a broadcast.
    Receive {
        buffer: Buffer,
    },
    /// Nothing moves.
    Nothing,
}

impl Transfer {
    /// Divides a payload into the buffer to deposit and the rest.
    pub(super) fn prepare(payload: Payload, rank: usize) -> (Option<Arc<Buffer>>, Transfer) {
        match payload {
            Payload::AllGather { input, output } => (Some(input), Transfer::AllGather { output }),
            Payload::ReduceScatter { input, output } => (Some(input), Transfer::ReduceScatter { output }),
            Payload::AllReduce { buffer } => (Some(Arc::new(buffer)), Transfer::AllReduce),
            Payload::Broadcast { buffer, root } if rank == root => (Some(Arc::new(buffer)), Transfer::Send),
            Payload::Broadcast { buffer, .. } => (None, Transfer::Receive { buffer }),
            Payload::Nothing => (None, Transfer::Nothing),
        }
    }

    /// Moves the data. All other ranks of the group do the same now.
    pub(super) fn run(self, exchange: &Exchange<'_>) -> Result<Buffer, CommError> {
        let failed = |reason: String| exchange.failed(&reason);
        exchange.delay_transfer(1);
        match self {
            Transfer::AllGather { output } if !output.is_allocated() => share(exchange, &output),
            Transfer::AllGather { output: mut buffer } | Transfer::Receive { mut buffer } => {
                copy_slots(&mut buffer, &exchange.deposits(0)).map_err(failed)?;
                exchange.arrive(1, None)?;
                Ok(buffer)
            }
            Transfer::ReduceScatter { mut output } => {
                let start = exchange.site.rank * output.len();
                sum(&mut output, &exchange.deposits(0), start).map_err(failed)?;
                exchange.arrive(1, None)?;
                Ok(output)
            }
            Transfer::AllReduce => all_reduce(exchange),
            Transfer::Send => {
                exchange.arrive(1, None)?;
                Ok(exchange.take_back(0))
            }
            Transfer::Nothing => Ok(empty()),
        }
    }
}

/// All-gather into memory that all ranks read. One rank writes it; the ranks take turns.
fn share(exchange: &Exchange<'_>, output: &Buffer) -> Result<Buffer, CommError> {
    let site = exchange.site;
    let leads = site.sequence % exchange.group.world_size() as u64 == site.rank as u64;
    let whole = leads.then(|| Arc::new(Buffer::concatenated(output.dtype(), &exchange.deposits(0))));
    exchange.arrive(1, whole)?;
    let whole = exchange.deposits(1).first().map(|whole| (**whole).clone());
    whole.ok_or_else(|| exchange.failed("the rank that writes for all has memory of its own"))
}

/// Reduce-scatter into a chunk per rank, then all-gather of the chunks.
fn all_reduce(exchange: &Exchange<'_>) -> Result<Buffer, CommError> {
    let failed = |reason: String| exchange.failed(&reason);
    let world_size = exchange.group.world_size();
    if world_size == 1 {
        return Ok(exchange.take_back(0));
    }
    let partial = {
        let inputs = exchange.deposits(0);
        let own = &inputs[exchange.site.rank];
        let chunk = chunk_range(own.len(), world_size, exchange.site.rank);
        let mut partial = own.like(chunk.len());
        sum(&mut partial, &inputs, chunk.start).map_err(failed)?;
        partial
    };
    exchange.arrive(1, Some(Arc::new(partial)))?;

    let mut buffer = exchange.take_back(0);
    copy_slots(&mut buffer, &exchange.deposits(1)).map_err(failed)?;
    exchange.arrive(2, None)?;
    Ok(buffer)
}

/// Writes `inputs` one after another into `output`.
fn copy_slots(output: &mut Buffer, inputs: &[Arc<Buffer>]) -> Result<(), String> {
    #[cfg(feature = "cube")]
    if let Some(memory) = output.device() {
        return device::copy_slots(memory, inputs);
    }
    let mut rest = output.as_bytes_mut();
    for input in inputs {
        let (slot, next) = rest.split_at_mut(input.size_in_bytes());
        slot.copy_from_slice(input.as_bytes());
        rest = next;
    }
    Ok(())
}

/// Sets `output` to the sum of `inputs` from `start` on.
fn sum(output: &mut Buffer, inputs: &[Arc<Buffer>], start: usize) -> Result<(), String> {
    #[cfg(feature = "cube")]
    if let Some(memory) = output.device() {
        return device::sum(output, memory, inputs, start);
    }
    sum_into(output, inputs, start).map_err(|problem| problem.to_string())
}
