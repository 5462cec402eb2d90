//! Transfers between threads: every rank copies or sums from the buffers of its peers.

#[cfg(feature = "cube")]
use super::device;
use super::group::Group;
use crate::backend::empty;
use crate::buffer::Buffer;
use crate::call::CallSite;
use crate::error::CommError;
use crate::operation::Operation;
use crate::payload::Payload;
use crate::reduce::{chunk_range, sum_into};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

pub(super) fn divide(payload: Payload, rank: usize) -> (Option<Arc<Buffer>>, Option<Buffer>) {
    match payload {
        Payload::AllGather { input, output } | Payload::ReduceScatter { input, output } => {
            (Some(input), Some(output))
        }
        Payload::Broadcast { buffer, root } if rank != root => (None, Some(buffer)),
        Payload::AllReduce { buffer } | Payload::Broadcast { buffer, .. } => (Some(Arc::new(buffer)), None),
        Payload::Nothing => (None, None),
    }
}

#[derive(Clone, Copy)]
pub(super) struct Exchange<'a> {
    pub(super) group: &'a Group,
    pub(super) site: &'a CallSite,
}

impl Exchange<'_> {
    fn failed(&self, reason: &str) -> CommError {
        CommError::Aborted { site: self.site.clone(), by: self.group.abort_by(self.site.rank, reason) }
    }

    fn delay(&self, point: u64) -> Option<Duration> {
        let delay = self.group.world.delay.as_ref();
        delay.map(|delay| delay.draw(self.group.world_ranks[self.site.rank], self.site, point))
    }

    pub(super) fn delay_entry(&self) {
        if let Some(time) = self.delay(0) {
            self.group.sleep(time);
        }
    }

    fn delay_transfer(&self, point: u64) {
        if let Some(time) = self.delay(point) {
            thread::sleep(time);
        }
    }

    fn deposits(&self, round: usize) -> Vec<Arc<Buffer>> {
        self.group.deposits(self.site, round)
    }

    /// Takes back this rank's deposit of the first round, which no peer reads any more.
    fn take_back(&self) -> Buffer {
        self.group.take_back(self.site, 0).map_or_else(empty, Arc::unwrap_or_clone)
    }

    /// Waits until all ranks have arrived at `round` and stopped using the previous round's deposits.
    fn arrive(&self, round: usize, deposit: Option<Arc<Buffer>>) -> Result<(), CommError> {
        self.delay_transfer(round as u64 + 1);
        self.group.arrive(self.site, round, deposit)
    }

    /// Moves the data, after this rank's deposit; `target` is the buffer to fill. All ranks run it concurrently.
    pub(super) fn run(&self, target: Option<Buffer>) -> Result<Buffer, CommError> {
        self.delay_transfer(1);
        match (self.site.operation, target) {
            (Operation::AllReduce, _) => self.all_reduce(),
            (Operation::AllGather, Some(output)) if !output.is_allocated() => self.share(&output),
            (Operation::ReduceScatter, Some(mut output)) => {
                let start = self.site.rank * output.len();
                self.sum(&mut output, &self.deposits(0), start)?;
                self.arrive(1, None)?;
                Ok(output)
            }
            (_, Some(mut buffer)) => {
                self.copy_chunks(&mut buffer, 0)?;
                self.arrive(1, None)?;
                Ok(buffer)
            }
            (Operation::Broadcast, None) => {
                self.arrive(1, None)?;
                Ok(self.take_back())
            }
            (_, None) => Ok(empty()),
        }
    }

    /// All-gather into memory that all ranks read. One rank writes the memory, a different one for each operation.
    fn share(&self, output: &Buffer) -> Result<Buffer, CommError> {
        let leads = self.site.sequence % self.group.world_size() as u64 == self.site.rank as u64;
        let whole = leads.then(|| Arc::new(Buffer::concatenated(output.dtype(), &self.deposits(0))));
        self.arrive(1, whole)?;
        let whole = self.deposits(1).first().map(|whole| (**whole).clone());
        whole.ok_or_else(|| self.failed("the rank that writes for all ranks passed an output with memory"))
    }

    fn all_reduce(&self) -> Result<Buffer, CommError> {
        let world_size = self.group.world_size();
        if world_size == 1 {
            return Ok(self.take_back());
        }
        let partial = {
            let inputs = self.deposits(0);
            let own = &inputs[self.site.rank];
            let chunk = chunk_range(own.len(), world_size, self.site.rank);
            let mut partial = own.like(chunk.len());
            self.sum(&mut partial, &inputs, chunk.start)?;
            partial
        };
        self.arrive(1, Some(Arc::new(partial)))?;

        let mut buffer = self.take_back();
        self.copy_chunks(&mut buffer, 1)?;
        self.arrive(2, None)?;
        Ok(buffer)
    }

    fn copy_chunks(&self, output: &mut Buffer, round: usize) -> Result<(), CommError> {
        let inputs = self.deposits(round);
        #[cfg(feature = "cube")]
        if let Some(memory) = output.device() {
            return device::copy_chunks(memory, &inputs).map_err(|reason| self.failed(&reason));
        }
        let mut rest = output.as_bytes_mut();
        for input in inputs {
            let (chunk, next) = rest.split_at_mut(input.size_in_bytes());
            chunk.copy_from_slice(input.as_bytes());
            rest = next;
        }
        Ok(())
    }

    fn sum(&self, output: &mut Buffer, inputs: &[Arc<Buffer>], start: usize) -> Result<(), CommError> {
        #[cfg(feature = "cube")]
        if let Some(memory) = output.device() {
            return device::sum(output, memory, inputs, start).map_err(|reason| self.failed(&reason));
        }
        sum_into(output, inputs, start).map_err(|problem| self.failed(&problem.to_string()))
    }
}
