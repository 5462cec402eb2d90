//! Reduction of gradients over the ranks.
//!
//! At most one reduce-scatter is in progress: before a group writes its first gradient, it waits for the previous
//! reduction and reuses its buffer. So backward holds one flat gradient in addition to the gradients of the current
//! group, and a reduction overlaps with the backward of a whole group.
//!
//! If every micro-batch is reduced, its reduced gradient is added to the sum of the earlier micro-batches. The hybrid
//! strategies reduce each micro-batch over the shard group, and only the last sum over the replicas. `NO_SHARD`
//! reduces each micro-batch over the replicas, so that it adds in the same order as `FULL_SHARD`.

use std::sync::{Arc, Mutex};

use kiln_collectives::{Buffer, DType, Label, Work};

use super::context::CommContext;
#[cfg(feature = "cube")]
use crate::buffers::Readback;
use crate::buffers::{add, cast_to, into_f32};
use crate::error::ShardError;
use crate::memory::{MemoryOwner, owned_by};
use crate::sync::lock;

/// Reduces the gradients of one rank's parameter groups.
pub(crate) struct Reducer {
    context: Arc<CommContext>,
    /// The reduction in progress, whose buffer the next gradient reuses.
    under_way: Mutex<Option<Reduction>>,
    /// A flat f32 gradient that has been reduced; the next group of the same size reuses its memory.
    spare: Mutex<Option<Buffer>>,
}

/// A gradient that is being reduced. [`Reducer::wait`] returns its shard. Clones refer to the same gradient.
#[derive(Clone)]
pub(crate) struct Reduction(Arc<Mutex<Stage>>);

/// The progress of a reduction.
enum Stage {
    /// Being summed over the ranks that share one copy of the model; to be added to the sum of `earlier`
    /// micro-batches.
    Scattering { work: Work, input: Arc<Buffer>, label: Label, earlier: Option<Buffer> },
    /// The whole gradient, being summed over the replicas; to be added to the sum of `earlier` micro-batches.
    Adding { work: Work, earlier: Buffer },
    /// This rank's shard, being summed over the replicas.
    Replicating(Work),
    /// This rank's shard, being copied to the host.
    #[cfg(feature = "cube")]
    Arriving(Readback),
    /// The reduced shard, in f32, in the memory where the optimizer runs.
    Reduced(Buffer),
    /// Taken, or lost in a failure that the context has stored.
    Gone,
}

impl Reduction {
    fn new(stage: Stage) -> Self {
        Reduction(Arc::new(Mutex::new(stage)))
    }

    fn take(&self) -> Stage {
        std::mem::replace(&mut *lock(&self.0), Stage::Gone)
    }

    fn set(&self, stage: Stage) {
        *lock(&self.0) = stage;
    }
}

impl Reducer {
    pub(crate) fn new(context: Arc<CommContext>) -> Self {
        Reducer { context, under_way: Mutex::default(), spare: Mutex::default() }
    }

    /// Returns a flat f32 gradient of `len` elements with arbitrary contents. Waits for the reduction in progress.
    pub(crate) fn take_buffer(&self, len: usize) -> Buffer {
        self.settle();
        // A spare buffer of a different size is freed first, to make room.
        let spare = lock(&self.spare).take().filter(|buffer| buffer.len() == len);
        let new = || self.context.placement().empty(DType::F32, len);
        spare.unwrap_or_else(|| owned_by(MemoryOwner::Gradients, new))
    }

    /// Starts reducing the flat gradient of a parameter group in one micro-batch. `earlier` is the reduced sum of the
    /// earlier micro-batches, if there is one.
    pub(crate) fn launch(
        &self,
        label: Label,
        gradient: Buffer,
        earlier: Option<Buffer>,
    ) -> Result<Reduction, ShardError> {
        let context = &self.context;
        let wire = context.policy.reduce_dtype;
        let stays = context.shard.is_none() && context.replicate.is_none();
        let (gradient, spare) = if wire == DType::F32 || stays {
            (gradient, None)
        } else {
            (cast_to(&gradient, wire)?, Some(gradient))
        };
        let stage = match (&context.shard, &context.replicate, earlier) {
            (Some(group), _, earlier) => {
                self.settle();
                let input = Arc::new(gradient);
                let len = input.len() / group.world_size();
                let new = || context.placement().empty(input.dtype(), len);
                let output = owned_by(MemoryOwner::Gradients, new);
                let work = group.reduce_scatter(label.clone(), input.clone(), output);
                Stage::Scattering { work, input, label, earlier }
            }
            (None, Some(group), Some(earlier)) => {
                self.settle();
                Stage::Adding { work: group.all_reduce(label, gradient), earlier }
            }
            // This gradient becomes the sum itself, so the next gradient cannot reuse its buffer.
            (None, Some(group), None) => {
                return Ok(Reduction::new(Stage::Replicating(group.all_reduce(label, gradient))));
            }
            (None, None, earlier) => return Ok(Reduction::new(self.arrive(added(earlier, gradient)?)?)),
        };
        let reduction = Reduction::new(stage);
        *lock(&self.under_way) = Some(reduction.clone());
        *lock(&self.spare) = spare;
        Ok(reduction)
    }

    /// Starts summing this rank's shard over the replicas, if there are any, once the shard covers the whole step.
    fn replicate(&self, label: Label, shard: Buffer) -> Result<Stage, ShardError> {
        match &self.context.replicate {
            Some(group) if self.context.is_last_micro_batch() => {
                let wire = self.context.policy.reduce_dtype;
                // The sum of several micro-batches is in f32.
                let shard = if shard.dtype() == wire { shard } else { cast_to(&shard, wire)? };
                Ok(Stage::Replicating(group.all_reduce(label, shard)))
            }
            _ => self.arrive(shard),
        }
    }

    /// Converts a reduced shard to f32. With offload, also starts copying it to the host once it covers the whole
    /// step.
    fn arrive(&self, shard: Buffer) -> Result<Stage, ShardError> {
        let shard = into_f32(shard)?;
        #[cfg(feature = "cube")]
        if self.context.offloads() && self.context.is_last_micro_batch() {
            return Ok(Stage::Arriving(Readback::of(&shard)?));
        }
        Ok(Stage::Reduced(shard))
    }

    /// Waits for the reduction in progress, and starts the next stage of the same gradient.
    pub(crate) fn settle(&self) {
        let Some(reduction) = lock(&self.under_way).take() else { return };
        let stage = match reduction.take() {
            Stage::Scattering { work, input, label, earlier } => {
                let Some(shard) = self.context.wait(work) else { return };
                // The collective is over on all ranks, so this is the last reference.
                if let Ok(input) = Arc::try_unwrap(input) {
                    self.keep(input);
                }
                added(earlier, shard).and_then(|sum| self.replicate(label, sum))
            }
            Stage::Adding { work, mut earlier } => {
                let Some(whole) = self.context.wait(work) else { return };
                let added = add(&mut earlier, &whole).map_err(ShardError::from);
                self.keep(whole);
                added.and_then(|()| self.arrive(earlier))
            }
            _ => return,
        };
        if let Some(stage) = self.context.or_fail(stage) {
            reduction.set(stage);
        }
    }

    /// Keeps the buffer of a reduced whole gradient for reuse, if it is f32.
    fn keep(&self, gradient: Buffer) {
        if gradient.dtype() == DType::F32 {
            *lock(&self.spare) = Some(gradient);
        }
    }

    /// Waits until the replicas have summed a gradient whose reduce-scatter [`Reducer::settle`] has completed, and
    /// starts moving it to the memory where the optimizer runs.
    pub(crate) fn start_arrival(&self, reduction: &Reduction) {
        let stage = match reduction.take() {
            Stage::Replicating(work) => {
                let shard = self.context.wait(work);
                shard.and_then(|shard| self.context.or_fail(self.arrive(shard)))
            }
            stage => Some(stage),
        };
        reduction.set(stage.unwrap_or(Stage::Gone));
    }

    /// Returns this rank's f32 shard of a gradient, waiting for its copy to the host if necessary. Call
    /// [`Reducer::start_arrival`] first. Returns `None` after a failure, which the context stores.
    pub(crate) fn wait(&self, reduction: &Reduction) -> Option<Buffer> {
        match reduction.take() {
            Stage::Reduced(shard) => Some(shard),
            #[cfg(feature = "cube")]
            Stage::Arriving(readback) => self.context.or_fail(readback.wait().map_err(ShardError::from)),
            Stage::Scattering { .. } | Stage::Adding { .. } | Stage::Replicating(_) | Stage::Gone => None,
        }
    }

    /// Frees the spare buffer, because this backward reduces nothing more.
    pub(crate) fn finish(&self) {
        *lock(&self.spare) = None;
    }
}

/// Returns `gradient` plus the f32 sum of `earlier` micro-batches, if there is one.
fn added(earlier: Option<Buffer>, gradient: Buffer) -> Result<Buffer, ShardError> {
    let Some(mut sum) = earlier else { return Ok(gradient) };
    add(&mut sum, &gradient)?;
    Ok(sum)
}
