//! How data moves between threads: every rank copies or sums straight from its peers' buffers.

use super::LocalEnd;
#[cfg(feature = "cube")]
use super::device;
use crate::buffer::Buffer;
use crate::call::CallSite;
use crate::error::CommError;
use crate::member::{Payload, empty};
use crate::reduce::{chunk_range, sum_into};
use std::sync::{Arc, mpsc};

/// What is left of the payload once the input has been deposited.
pub(super) enum Transfer {
    AllGather {
        output: Buffer,
    },
    ReduceScatter {
        output: Buffer,
    },
    AllReduce,
    /// Root of a broadcast; its buffer is deposited.
    Send,
    Receive {
        buffer: Buffer,
    },
    Barrier,
    Split {
        reply: mpsc::Sender<LocalEnd>,
    },
}

impl Transfer {
    /// Divides a payload into the buffer to lend to the peers and the rest.
    pub(super) fn prepare(
        payload: Payload<LocalEnd>,
        rank: usize,
    ) -> (Option<Arc<Buffer>>, Transfer) {
        match payload {
            Payload::AllGather { input, output } => (Some(input), Transfer::AllGather { output }),
            Payload::ReduceScatter { input, output } => {
                (Some(input), Transfer::ReduceScatter { output })
            }
            Payload::AllReduce { buffer } => (Some(Arc::new(buffer)), Transfer::AllReduce),
            Payload::Broadcast { buffer, root } if rank == root => {
                (Some(Arc::new(buffer)), Transfer::Send)
            }
            Payload::Broadcast { buffer, .. } => (None, Transfer::Receive { buffer }),
            Payload::Barrier | Payload::Nothing => (None, Transfer::Barrier),
            Payload::Split { reply } => (None, Transfer::Split { reply }),
        }
    }

    /// Moves the data. Every rank of the group is doing the same now.
    pub(super) fn run(self, end: &LocalEnd, site: &CallSite) -> Result<Buffer, CommError> {
        let group = end.group();
        let failed = |reason: String| end.failed(site, &reason);
        end.dawdle(site, 1);
        match self {
            Transfer::AllGather { output } if !output.is_allocated() => share(end, site, &output),
            Transfer::AllGather { mut output } => {
                copy_slots(&mut output, &group.borrow(site, 0)).map_err(failed)?;
                end.dawdle(site, 2);
                group.arrive(site, 1, None)?;
                Ok(output)
            }
            Transfer::ReduceScatter { mut output } => {
                let start = site.rank * output.len();
                sum(&mut output, &group.borrow(site, 0), start).map_err(failed)?;
                end.dawdle(site, 2);
                group.arrive(site, 1, None)?;
                Ok(output)
            }
            Transfer::AllReduce => all_reduce(end, site),
            Transfer::Send => {
                group.arrive(site, 1, None)?;
                Ok(own_again(group.take_back(site, 0)))
            }
            Transfer::Receive { mut buffer } => {
                copy_slots(&mut buffer, &group.borrow(site, 0)).map_err(failed)?;
                end.dawdle(site, 2);
                group.arrive(site, 1, None)?;
                Ok(buffer)
            }
            Transfer::Barrier => Ok(empty()),
            Transfer::Split { reply } => {
                if let Some(place) = group.take_place(site) {
                    let shared = Arc::clone(&end.shared);
                    let delay = end.delay.clone();
                    // If the caller is gone, the place drops here and leaves its group.
                    let _ = reply.send(LocalEnd { place, shared, delay });
                }
                Ok(empty())
            }
        }
    }
}

/// All-gather into memory that all ranks read: one of them writes it, each in turn.
fn share(end: &LocalEnd, site: &CallSite, output: &Buffer) -> Result<Buffer, CommError> {
    let group = end.group();
    let leads = site.sequence % group.world_size() as u64 == site.rank as u64;
    let whole =
        leads.then(|| Arc::new(Buffer::concatenated(output.dtype(), &group.borrow(site, 0))));
    end.dawdle(site, 2);
    group.arrive(site, 1, whole)?;
    let whole = group.borrow(site, 1).first().map(|whole| (**whole).clone());
    whole.ok_or_else(|| end.failed(site, "the rank that writes for all has memory of its own"))
}

/// Reduce-scatter into a chunk per rank, then all-gather of the chunks.
fn all_reduce(end: &LocalEnd, site: &CallSite) -> Result<Buffer, CommError> {
    let group = end.group();
    let failed = |reason: String| end.failed(site, &reason);
    let world_size = group.world_size();
    if world_size == 1 {
        return Ok(own_again(group.take_back(site, 0)));
    }
    let partial = {
        let inputs = group.borrow(site, 0);
        let own = &inputs[site.rank];
        let chunk = chunk_range(own.len(), world_size, site.rank);
        let mut partial = own.like(chunk.len());
        sum(&mut partial, &inputs, chunk.start).map_err(failed)?;
        partial
    };
    end.dawdle(site, 2);
    group.arrive(site, 1, Some(Arc::new(partial)))?;

    let mut buffer = own_again(group.take_back(site, 0));
    copy_slots(&mut buffer, &group.borrow(site, 1)).map_err(failed)?;
    end.dawdle(site, 3);
    group.arrive(site, 2, None)?;
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

/// The buffer behind a deposit that no peer reads any more.
fn own_again(deposit: Option<Arc<Buffer>>) -> Buffer {
    deposit.map_or_else(empty, Arc::unwrap_or_clone)
}
