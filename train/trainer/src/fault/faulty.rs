//! A communicator that misbehaves once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kiln_collectives::{
    Buffer, CommError, Communicator, DType, Flight, Holds, Label, Phase, RankView, Recorder, Work,
};

use super::drill::Drill;
use super::spec::{Changeable, Fault, FaultKind};

/// A rank's communicator, or that of a group split from it, wrapped with a [`Drill`].
pub struct Faulty {
    inner: Arc<dyn Communicator>,
    drill: Arc<Drill>,
    gathered: Mutex<HashMap<Arc<str>, Buffer>>,
}

impl Faulty {
    fn new(inner: Arc<dyn Communicator>, drill: Arc<Drill>) -> Self {
        Faulty { inner, drill, gathered: Mutex::default() }
    }

    /// Gathers, but returns the previous gather's result of this scope if `is_stale`.
    fn gather_again(&self, label: Label, input: Arc<Buffer>, output: Buffer, is_stale: bool) -> Work {
        let scope = label.scope.clone();
        let result = self.inner.all_gather(label, input, output).wait(WAIT);
        Work::ready(result.map(|now| {
            let mut gathered = self.gathered.lock().unwrap_or_else(PoisonError::into_inner);
            let before = gathered.insert(scope, now.clone());
            before.filter(|_| is_stale).unwrap_or(now)
        }))
    }
}

const WAIT: Duration = Duration::from_secs(600);

/// Wraps `world` with the fault, if the fault applies to this rank of a job restarted `restarts` times.
/// Also returns the drill, which the run must inform of its progress.
pub fn rehearse(
    world: Arc<dyn Communicator>,
    fault: Option<&Fault>,
    restarts: u64,
) -> (Arc<dyn Communicator>, Option<Arc<Drill>>) {
    match fault {
        Some(fault) if fault.rank == world.rank() && (restarts == 0 || fault.every_life) => {
            let drill = Arc::new(Drill::new(fault));
            (Arc::new(Faulty::new(world, drill.clone())), Some(drill))
        }
        _ => (world, None),
    }
}

fn nothing() -> Buffer {
    Buffer::zeros(DType::U8, 0)
}

/// Returns a copy whose first element is NaN: all bits are set, which is NaN in every float type.
fn poisoned(buffer: &Buffer) -> Buffer {
    let width = buffer.dtype().size();
    let set = |bytes: &mut [u8]| bytes.iter_mut().take(width).for_each(|byte| *byte = 0xFF);
    buffer.changed(set).unwrap_or_else(|error| {
        tracing::warn!("the fault drill could not write a NaN: {error}");
        buffer.clone()
    })
}

fn scaled(buffer: &Buffer, factor: f64) -> Buffer {
    let scale = |bytes: &mut [u8]| match buffer.dtype() {
        DType::F32 => bytes.as_chunks_mut().0.iter_mut().for_each(|bytes| {
            *bytes = (f32::from_ne_bytes(*bytes) * factor as f32).to_ne_bytes();
        }),
        dtype => tracing::warn!("the fault drill scales f32 only, not {dtype}"),
    };
    buffer.changed(scale).unwrap_or_else(|error| {
        tracing::warn!("the fault drill could not scale the buffer: {error}");
        buffer.clone()
    })
}

fn replaced(sum: &Buffer, own: &[u8]) -> Buffer {
    sum.changed(|bytes| bytes.copy_from_slice(own)).unwrap_or_else(|error| {
        tracing::warn!("the fault drill could not replace the sum: {error}");
        sum.clone()
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

    fn is_one_process(&self) -> bool {
        self.inner.is_one_process()
    }

    fn all_gather(&self, label: Label, input: Arc<Buffer>, output: Buffer) -> Work {
        let len = input.len() + 1;
        let fault = self.drill.calling(&label, Changeable::Gather);
        if self.drill.is_stale() {
            return self.gather_again(label, input, output, fault.is_some());
        }
        let (input, output) = match fault {
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
            Some(FaultKind::Scale(factor)) => (Arc::new(scaled(&input, factor)), output),
            Some(FaultKind::Unreduced) if input.is_on_host() => {
                let sum = self.inner.reduce_scatter(label, input.clone(), output).wait(WAIT);
                return Work::ready(sum.map(|sum| {
                    let start = self.rank() * sum.size_in_bytes();
                    replaced(&sum, &input.as_bytes()[start..start + sum.size_in_bytes()])
                }));
            }
            _ => (input, output),
        };
        self.inner.reduce_scatter(label, input, output)
    }

    fn all_reduce(&self, label: Label, buffer: Buffer) -> Work {
        match self.drill.calling(&label, Changeable::Sum) {
            Some(FaultKind::Skip) => Work::ready(Ok(buffer)),
            Some(FaultKind::Size) => self.inner.all_reduce(label, buffer.like(buffer.len() + 1)),
            Some(FaultKind::Error) => self.inner.all_reduce(label, nothing()),
            Some(FaultKind::Nan) => self.inner.all_reduce(label, poisoned(&buffer)),
            Some(FaultKind::Scale(factor)) => self.inner.all_reduce(label, scaled(&buffer, factor)),
            Some(FaultKind::Unreduced) if buffer.is_on_host() => {
                let own = buffer.as_bytes().to_vec();
                let sum = self.inner.all_reduce(label, buffer).wait(WAIT);
                Work::ready(sum.map(|sum| replaced(&sum, &own)))
            }
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
            // A barrier has neither a count nor arguments. A different operation is just as wrong.
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
        // Faults that change a call wait for a call whose result they can replace.
        let label = Label::new(name, Phase::Init);
        let _ = self.drill.calling(&label, Changeable::Nothing);
        let group = self.inner.split_within(name, color, key, timeout)?;
        Ok(group.map(|inner| Arc::new(Faulty::new(inner, self.drill.clone())) as Arc<dyn Communicator>))
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }

    fn hold(&self, is_held: bool) {
        self.inner.hold(is_held);
    }

    fn shares_holds(&self) -> bool {
        self.inner.shares_holds()
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

    fn view(&self) -> RankView {
        self.inner.view()
    }
}
