//! Gradients on their way over the ranks.
//!
//! At most one reduce-scatter is under way: the next unit's first gradient waits for it and takes
//! over its buffer, so that backward holds one flat gradient besides the gradients of the unit it
//! computes. The wait spans the whole backward of a unit, which is what hides the communication.

use std::sync::{Arc, Mutex};

use kiln_collectives::{Buffer, DType, Phase, Work};

use crate::error::ShardError;
use crate::flat;
use crate::runtime::{Runtime, lock};
use crate::unit::Unit;

#[derive(Default)]
pub(crate) struct Reducer {
    state: Mutex<ReducerState>,
}

#[derive(Default)]
struct ReducerState {
    /// The reduce-scatter under way, with the gradient it reads.
    scattering: Option<(Arc<Unit>, Work, Arc<Buffer>)>,
    /// All-reduces over the replicas under way, in launch order.
    replicating: Vec<(Arc<Unit>, Work)>,
    /// A flat gradient that has been reduced, for the next unit of the same size.
    spare: Option<Buffer>,
}

impl Reducer {
    /// A flat f32 gradient of `len` elements with arbitrary contents.
    pub(crate) fn take_buffer(&self, runtime: &Runtime, len: usize) -> Buffer {
        self.settle(runtime);
        let spare = lock(&self.state).spare.take();
        match spare {
            Some(buffer) if buffer.len() == len => buffer,
            _ => runtime.placement().empty(DType::F32, len),
        }
    }

    /// Starts reducing the gradient of `unit`.
    pub(crate) fn launch(
        &self,
        runtime: &Runtime,
        unit: &Arc<Unit>,
        gradient: Buffer,
    ) -> Result<(), ShardError> {
        let wire = runtime.policy.reduce_dtype;
        let stays = runtime.shard.is_none() && runtime.replicate.is_none();
        let (gradient, spare) = if wire == DType::F32 || stays {
            (gradient, None)
        } else {
            (flat::cast_to(&gradient, wire)?, Some(gradient))
        };
        if let Some(group) = &runtime.shard {
            self.settle(runtime);
            let input = Arc::new(gradient);
            let len = input.len() / group.world_size();
            let output = runtime.placement().empty(input.dtype(), len);
            let label = unit.label(Phase::Backward);
            let work = group.reduce_scatter(label, input.clone(), output);
            let mut state = lock(&self.state);
            state.scattering = Some((unit.clone(), work, input));
            state.spare = spare;
            Ok(())
        } else {
            self.replicate(runtime, unit.clone(), gradient)
        }
    }

    /// Sums a reduced shard over the replicas, if there are any.
    fn replicate(
        &self,
        runtime: &Runtime,
        unit: Arc<Unit>,
        shard: Buffer,
    ) -> Result<(), ShardError> {
        match &runtime.replicate {
            Some(group) => {
                let work = group.all_reduce(unit.label(Phase::Backward), shard);
                lock(&self.state).replicating.push((unit, work));
            }
            None => unit.keep_reduced(shard)?,
        }
        Ok(())
    }

    /// Waits for the reduce-scatter under way and hands its result on.
    fn settle(&self, runtime: &Runtime) {
        let Some((unit, work, input)) = lock(&self.state).scattering.take() else { return };
        let Some(shard) = runtime.wait(work) else { return };
        // The collective is over on all ranks, so this is the last reference.
        if let Ok(input) = Arc::try_unwrap(input)
            && input.dtype() == DType::F32
        {
            lock(&self.state).spare = Some(input);
        }
        if let Err(error) = self.replicate(runtime, unit, shard) {
            runtime.fail(error);
        }
    }

    /// Waits for every reduction of the step; afterwards each unit has its reduced shard.
    pub(crate) fn finish(&self, runtime: &Runtime) {
        self.settle(runtime);
        let replicating = std::mem::take(&mut lock(&self.state).replicating);
        for (unit, work) in replicating {
            let Some(shard) = runtime.wait(work) else { continue };
            if let Err(error) = unit.keep_reduced(shard) {
                runtime.fail(error);
            }
        }
        lock(&self.state).spare = None;
        for unit in (0..).map_while(|position| runtime.unit(position)) {
            if let Err(error) = unit.settle_reduced() {
                runtime.fail(error);
            }
        }
    }
}
