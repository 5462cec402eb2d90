//! Gradients on their way over the ranks.
//!
//! At most one reduce-scatter is under way: the next group's first gradient waits for it and takes
//! over its buffer, so that backward holds one flat gradient besides the gradients of the group it
//! computes. The wait spans the whole backward of a group, which is what hides the communication.

use std::sync::{Arc, Mutex};

use kiln_collectives::{Buffer, DType, Label, Work};

use super::context::CommContext;
#[cfg(feature = "cube")]
use crate::buffers::Readback;
use crate::buffers::{cast_to, into_f32};
use crate::error::ShardError;
use crate::memory::{MemoryOwner, owned_by};
use crate::sync::lock;

/// Reduces the gradients of one rank's parameter groups.
pub(crate) struct Reducer {
    context: Arc<CommContext>,
    /// The reduce-scatter under way.
    scattering: Mutex<Option<Reduction>>,
    /// A flat f32 gradient that has been reduced, for the next group of the same size.
    spare: Mutex<Option<Buffer>>,
}

/// One gradient on its way; its shard is there after [`Reducer::wait`]. Clones are the same one.
#[derive(Clone)]
pub(crate) struct Reduction(Arc<Mutex<Stage>>);

/// How far a gradient has come.
enum Stage {
    /// Summed over the ranks that share one copy of the model.
    Scattering { work: Work, input: Arc<Buffer>, label: Label },
    /// This rank's shard, summed over the replicas.
    Replicating(Work),
    /// This rank's shard, on its way to the host.
    #[cfg(feature = "cube")]
    Arriving(Readback),
    /// f32, where the optimizer needs it.
    Reduced(Buffer),
    /// Taken, or lost in a failure that the context has kept.
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
        Reducer { context, scattering: Mutex::default(), spare: Mutex::default() }
    }

    /// A flat f32 gradient of `len` elements with arbitrary contents. Waits for the reduce-scatter under way.
    pub(crate) fn take_buffer(&self, len: usize) -> Buffer {
        self.settle();
        // One of another size makes room first.
        let spare = lock(&self.spare).take().filter(|buffer| buffer.len() == len);
        let new = || self.context.placement().empty(DType::F32, len);
        spare.unwrap_or_else(|| owned_by(MemoryOwner::Gradients, new))
    }

    /// Starts reducing the flat gradient of a parameter group.
    pub(crate) fn launch(&self, label: Label, gradient: Buffer) -> Result<Reduction, ShardError> {
        let context = &self.context;
        let wire = context.policy.reduce_dtype;
        let stays = context.shard.is_none() && context.replicate.is_none();
        let (gradient, spare) = if wire == DType::F32 || stays {
            (gradient, None)
        } else {
            (cast_to(&gradient, wire)?, Some(gradient))
        };
        let Some(group) = &context.shard else {
            return Ok(Reduction::new(self.replicate(label, gradient)?));
        };
        self.settle();
        let input = Arc::new(gradient);
        let len = input.len() / group.world_size();
        let new = || context.placement().empty(input.dtype(), len);
        let output = owned_by(MemoryOwner::Gradients, new);
        let work = group.reduce_scatter(label.clone(), input.clone(), output);
        let reduction = Reduction::new(Stage::Scattering { work, input, label });
        *lock(&self.scattering) = Some(reduction.clone());
        *lock(&self.spare) = spare;
        Ok(reduction)
    }

    /// Sums a reduced shard over the replicas, if there are any.
    fn replicate(&self, label: Label, shard: Buffer) -> Result<Stage, ShardError> {
        match &self.context.replicate {
            Some(group) => Ok(Stage::Replicating(group.all_reduce(label, shard))),
            None => self.arrive(shard),
        }
    }

    /// Brings a reduced shard to where the optimizer needs it.
    fn arrive(&self, shard: Buffer) -> Result<Stage, ShardError> {
        let shard = into_f32(shard)?;
        #[cfg(feature = "cube")]
        if self.context.offloads() {
            return Ok(Stage::Arriving(Readback::of(&shard)?));
        }
        Ok(Stage::Reduced(shard))
    }

    /// Waits for the reduce-scatter under way, and starts what comes after it.
    pub(crate) fn settle(&self) {
        let Some(reduction) = lock(&self.scattering).take() else { return };
        let Stage::Scattering { work, input, label } = reduction.take() else { return };
        let Some(shard) = self.context.wait(work) else { return };
        // The collective is over on all ranks, so this is the last reference.
        if let Ok(input) = Arc::try_unwrap(input)
            && input.dtype() == DType::F32
        {
            *lock(&self.spare) = Some(input);
        }
        if let Some(stage) = self.context.or_fail(self.replicate(label, shard)) {
            reduction.set(stage);
        }
    }

    /// Waits for the sum over the replicas of a gradient that [`Reducer::settle`] has seen through its
    /// reduce-scatter, and starts to bring it to where the optimizer needs it.
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

    /// Waits for a gradient after [`Reducer::start_arrival`]: this rank's shard of it, f32. `None` after a
    /// failure, which the context keeps.
    pub(crate) fn wait(&self, reduction: &Reduction) -> Option<Buffer> {
        match reduction.take() {
            Stage::Reduced(shard) => Some(shard),
            #[cfg(feature = "cube")]
            Stage::Arriving(readback) => self.context.or_fail(readback.wait().map_err(ShardError::from)),
            Stage::Scattering { .. } | Stage::Replicating(_) | Stage::Gone => None,
        }
    }

    /// Frees the spare buffer: the step reduces nothing more.
    pub(crate) fn finish(&self) {
        *lock(&self.spare) = None;
    }
}
