//! The thread that runs the operations of one rank in one group.

use super::RankContext;
use super::group::{Group, Member};
use crate::buffer::{Buffer, BufferError};
use crate::call::{ArgumentError, Call, CallSite};
use crate::dtype::DType;
use crate::error::CommError;
use crate::recorder::RecordId;
use crate::reduce::sum_into;
use crate::work::Completer;
use std::ops::Range;
use std::sync::{Arc, mpsc};
use std::thread;

/// One operation in the queue of a worker.
pub(super) struct Job {
    pub(super) site: CallSite,
    pub(super) call: Call,
    pub(super) payload: Payload,
    pub(super) record: RecordId,
    pub(super) completer: Completer,
}

/// The buffers of an operation.
pub(super) enum Payload {
    AllGather {
        input: Arc<Buffer>,
        output: Buffer,
    },
    ReduceScatter {
        input: Arc<Buffer>,
        output: Buffer,
    },
    AllReduce {
        buffer: Buffer,
    },
    Broadcast {
        buffer: Buffer,
        root: usize,
    },
    Barrier,
    Split {
        reply: mpsc::Sender<Member>,
    },
    /// Arguments were invalid; the call is still posted so that all ranks learn of it.
    Nothing,
}

pub(super) struct Worker {
    pub(super) group: Arc<Group>,
    pub(super) rank: usize,
    pub(super) context: Arc<RankContext>,
}

impl Worker {
    /// Runs jobs in order until the queue is closed.
    pub(super) fn run(self, queue: mpsc::Receiver<Job>) {
        let _guard = CrashGuard(&self);
        if let Some(on_start) = &self.context.on_worker_start {
            on_start(self.context.world_rank);
        }
        for job in queue {
            self.context.recorder.started(job.record);
            let result = self.execute(&job.site, job.call, job.payload);
            if result.is_ok() {
                self.context.recorder.finished(job.record);
            }
            job.completer.complete(result);
        }
    }

    fn execute(&self, site: &CallSite, call: Call, payload: Payload) -> Result<Buffer, CommError> {
        if let Some(delay) = self.context.draw_delay(site, 0) {
            self.group.pause(delay);
        }
        let (input, transfer) = Transfer::prepare(payload, site.rank);
        self.group.enter(site, call, input)?;
        let result = transfer.run(self, site);
        match &result {
            Ok(_) => self.group.close(site),
            // Arguments were checked, so this is a bug here; the peers must not wait for us.
            Err(error) => {
                self.group.crash(self.rank, &error.to_string());
                self.group.close(site);
            }
        }
        result
    }

    /// Delays the transfer if random delays are on.
    fn dawdle(&self, site: &CallSite, point: u64) {
        if let Some(delay) = self.context.draw_delay(site, point) {
            thread::sleep(delay);
        }
    }
}

/// Frees the peers if the worker panics.
struct CrashGuard<'a>(&'a Worker);

impl Drop for CrashGuard<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.group.crash(self.0.rank, "its worker panicked");
        }
    }
}

/// What is left of the payload once the input has been deposited.
enum Transfer {
    AllGather {
        output: Buffer,
    },
    ReduceScatter {
        output: Buffer,
    },
    AllReduce {
        dtype: DType,
        len: usize,
    },
    /// Root of a broadcast; its buffer is deposited.
    Send,
    Receive {
        buffer: Buffer,
    },
    Barrier,
    Split {
        reply: mpsc::Sender<Member>,
    },
}

impl Transfer {
    /// Divides a payload into the buffer to lend to the peers and the rest.
    fn prepare(payload: Payload, rank: usize) -> (Option<Arc<Buffer>>, Transfer) {
        match payload {
            Payload::AllGather { input, output } => (Some(input), Transfer::AllGather { output }),
            Payload::ReduceScatter { input, output } => {
                (Some(input), Transfer::ReduceScatter { output })
            }
            Payload::AllReduce { buffer } => {
                let (dtype, len) = (buffer.dtype(), buffer.len());
                (Some(Arc::new(buffer)), Transfer::AllReduce { dtype, len })
            }
            Payload::Broadcast { buffer, root } if rank == root => {
                (Some(Arc::new(buffer)), Transfer::Send)
            }
            Payload::Broadcast { buffer, .. } => (None, Transfer::Receive { buffer }),
            Payload::Barrier | Payload::Nothing => (None, Transfer::Barrier),
            Payload::Split { reply } => (None, Transfer::Split { reply }),
        }
    }

    /// Moves the data. Every rank of the group is doing the same now.
    fn run(self, worker: &Worker, site: &CallSite) -> Result<Buffer, CommError> {
        let group = &worker.group;
        worker.dawdle(site, 1);
        match self {
            Transfer::AllGather { mut output } => {
                copy_slots(&mut output, &group.borrow(site, 0));
                worker.dawdle(site, 2);
                group.arrive(site, 1, None)?;
                Ok(output)
            }
            Transfer::ReduceScatter { mut output } => {
                let start = site.rank * output.len();
                sum(&mut output, group.borrow(site, 0), start, site)?;
                worker.dawdle(site, 2);
                group.arrive(site, 1, None)?;
                Ok(output)
            }
            Transfer::AllReduce { dtype, len } => all_reduce(worker, site, dtype, len),
            Transfer::Send => {
                group.arrive(site, 1, None)?;
                Ok(own_again(group.take_back(site, 0)))
            }
            Transfer::Receive { mut buffer } => {
                copy_slots(&mut buffer, &group.borrow(site, 0));
                worker.dawdle(site, 2);
                group.arrive(site, 1, None)?;
                Ok(buffer)
            }
            Transfer::Barrier => Ok(empty()),
            Transfer::Split { reply } => {
                if let Some(member) = group.take_member(site) {
                    // If the caller is gone, the member drops here and leaves its group.
                    let _ = reply.send(member);
                }
                Ok(empty())
            }
        }
    }
}

/// Reduce-scatter into a chunk per rank, then all-gather of the chunks.
fn all_reduce(
    worker: &Worker,
    site: &CallSite,
    dtype: DType,
    len: usize,
) -> Result<Buffer, CommError> {
    let group = &worker.group;
    let world_size = group.world_size();
    if world_size == 1 {
        return Ok(own_again(group.take_back(site, 0)));
    }
    let chunk = chunk_range(len, world_size, site.rank);
    let mut partial = Buffer::zeros(dtype, chunk.len());
    sum(&mut partial, group.borrow(site, 0), chunk.start, site)?;
    worker.dawdle(site, 2);
    group.arrive(site, 1, Some(Arc::new(partial)))?;

    let mut buffer = own_again(group.take_back(site, 0));
    copy_slots(&mut buffer, &group.borrow(site, 1));
    worker.dawdle(site, 3);
    group.arrive(site, 2, None)?;
    Ok(buffer)
}

/// Writes `inputs` one after another into `output`.
fn copy_slots(output: &mut Buffer, inputs: &[Arc<Buffer>]) {
    let mut rest = output.as_bytes_mut();
    for input in inputs {
        let (slot, next) = rest.split_at_mut(input.size_in_bytes());
        slot.copy_from_slice(input.as_bytes());
        rest = next;
    }
}

/// Sums and releases `inputs`.
fn sum(
    output: &mut Buffer,
    inputs: Vec<Arc<Buffer>>,
    start: usize,
    site: &CallSite,
) -> Result<(), CommError> {
    sum_into(output, &inputs, start).map_err(|error: BufferError| {
        let problem = ArgumentError::DType { input: error.actual, output: error.requested };
        CommError::invalid(site, problem)
    })
}

/// The part of `len` elements that `rank` reduces: equal parts, the first ones longer by one
/// if `len` is not divisible.
fn chunk_range(len: usize, world_size: usize, rank: usize) -> Range<usize> {
    let (size, longer) = (len / world_size, len % world_size);
    let start = |rank: usize| rank * size + rank.min(longer);
    start(rank)..start(rank + 1)
}

/// The buffer behind a deposit that no peer reads any more.
fn own_again(deposit: Option<Arc<Buffer>>) -> Buffer {
    deposit.map_or_else(empty, Arc::unwrap_or_clone)
}

fn empty() -> Buffer {
    Buffer::zeros(DType::U8, 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_everything_in_order() {
        for len in [0, 1, 2, 7, 8, 1023] {
            for world_size in [1, 2, 3, 8] {
                let mut next = 0;
                for rank in 0..world_size {
                    let chunk = chunk_range(len, world_size, rank);
                    assert_eq!(chunk.start, next);
                    assert!(chunk.len() <= len.div_ceil(world_size));
                    next = chunk.end;
                }
                assert_eq!(next, len);
            }
        }
    }
}
