//! A communicator that misbehaves once.

use std::sync::Arc;
use std::time::Duration;

use kiln_collectives::{
    Buffer, CommError, Communicator, DType, Flight, Holds, Label, Observer, Phase, Recorder, Work,
};

use super::drill::Drill;
use super::spec::{Changeable, Fault, FaultKind};

/// A rank's communicator, or that of a group split from it, with a [`Drill`] in between.
pub struct Faulty {
    inner: Arc<dyn Communicator>,
    drill: Arc<Drill>,
}

/// `world` with the fault built in, and the drill to be kept informed, if it is this rank's turn in
/// a job that was started again `restarts` times.
pub fn rehearse(
    world: Arc<dyn Communicator>,
    fault: Option<&Fault>,
    restarts: u64,
) -> (Arc<dyn Communicator>, Option<Arc<Drill>>) {
    match fault {
        Some(fault) if fault.rank == world.rank() && (restarts == 0 || fault.every_life) => {
            let drill = Arc::new(Drill::new(fault));
            (Arc::new(Faulty { inner: world, drill: drill.clone() }), Some(drill))
        }
        _ => (world, None),
    }
}

/// An empty result, as of a barrier.
fn nothing() -> Buffer {
    Buffer::zeros(DType::U8, 0)
}

/// A copy whose first element is NaN: so is a float of any width with all bits set.
fn poisoned(buffer: &Buffer) -> Buffer {
    let width = buffer.dtype().size();
    let set = |bytes: &mut [u8]| bytes.iter_mut().take(width).for_each(|byte| *byte = 0xFF);
    buffer.changed(set).unwrap_or_else(|error| {
        // The drill shows that nothing happened.
        tracing::warn!("the fault drill has no NaN: {error}");
        buffer.clone()
    })
}

impl Communicator for Faulty {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn name(&self) -> &str {
        self.inner.name()
    }

    fn backend(&self) -> &'static str {
        self.inner.backend()
    }

    fn all_gather(&self, label: Label, input: Arc<Buffer>, output: Buffer) -> Work {
        let len = input.len() + 1;
        let (input, output) = match self.drill.calling(&label, Changeable::Call) {
            Some(FaultKind::Skip) => return Work::ready(Ok(input.like(output.len()))),
            Some(FaultKind::Size) => (Arc::new(input.like(len)), output.like(len * self.world_size())),
            Some(FaultKind::Error) => {
                let longer = output.like(output.len() + 1);
                (input, longer)
            }
            _ => (input, output),
        };
        self.inner.all_gather(label, input, output)
    }

    fn shares_gathers(&self) -> bool {
        self.inner.shares_gathers()
    }

    fn reduce_scatter(&self, label: Label, input: Arc<Buffer>, output: Buffer) -> Work {
        let len = output.len() + 1;
        let (input, output) = match self.drill.calling(&label, Changeable::Sum) {
            Some(FaultKind::Skip) => return Work::ready(Ok(output)),
            Some(FaultKind::Size) => (Arc::new(input.like(len * self.world_size())), output.like(len)),
            Some(FaultKind::Error) => (input, output.like(len)),
            Some(FaultKind::Nan) => (Arc::new(poisoned(&input)), output),
            _ => (input, output),
        };
        self.inner.reduce_scatter(label, input, output)
    }

    fn all_reduce(&self, label: Label, buffer: Buffer) -> Work {
        match self.drill.calling(&label, Changeable::Sum) {
            Some(FaultKind::Skip) => Work::ready(Ok(buffer)),
            Some(FaultKind::Size) => self.inner.all_reduce(label, buffer.like(buffer.len() + 1)),
            // Bytes have no sum.
            Some(FaultKind::Error) => self.inner.all_reduce(label, nothing()),
            Some(FaultKind::Nan) => self.inner.all_reduce(label, poisoned(&buffer)),
            _ => self.inner.all_reduce(label, buffer),
        }
    }

    fn broadcast(&self, label: Label, buffer: Buffer, root: usize) -> Work {
        match self.drill.calling(&label, Changeable::Call) {
            Some(FaultKind::Skip) => Work::ready(Ok(buffer)),
            Some(FaultKind::Size) => self.inner.broadcast(label, buffer.like(buffer.len() + 1), root),
            Some(FaultKind::Error) => self.inner.broadcast(label, buffer, self.world_size()),
            _ => self.inner.broadcast(label, buffer, root),
        }
    }

    fn barrier(&self, label: Label) -> Work {
        match self.drill.calling(&label, Changeable::Call) {
            Some(FaultKind::Skip) => Work::ready(Ok(nothing())),
            // A barrier has neither a count nor arguments; another operation is as wrong.
            Some(FaultKind::Size) => self.inner.all_reduce(label, Buffer::zeros(DType::F32, 1)),
            Some(FaultKind::Error) => self.inner.all_reduce(label, nothing()),
            _ => self.inner.barrier(label),
        }
    }

    fn split_within(
        &self,
        name: &str,
        color: Option<u32>,
        key: i64,
        timeout: Duration,
    ) -> Result<Option<Arc<dyn Communicator>>, CommError> {
        // What changes a call waits for one that has a result to stand in for.
        let label = Label::new(name, Phase::Init);
        let _ = self.drill.calling(&label, Changeable::Nothing);
        let group = self.inner.split_within(name, color, key, timeout)?;
        Ok(group.map(|inner| Arc::new(Faulty { inner, drill: self.drill.clone() }) as Arc<dyn Communicator>))
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }

    fn hold(&self, is_held: bool) {
        self.inner.hold(is_held);
    }

    fn holds(&self) -> &Holds {
        self.inner.holds()
    }

    fn failure(&self) -> Option<CommError> {
        self.inner.failure()
    }

    fn nodes(&self) -> Vec<usize> {
        self.inner.nodes()
    }

    fn flight(&self) -> Flight {
        self.inner.flight()
    }

    fn recorder(&self) -> &Arc<Recorder> {
        self.inner.recorder()
    }

    fn observer(&self) -> Observer {
        self.inner.observer()
    }
}
