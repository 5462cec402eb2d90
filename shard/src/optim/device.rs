//! An optimizer step on a GPU that nothing on the host waits for.
//!
//! Whether and how far weights move depends on the norm of the gradient over all ranks. Reading it
//! would make the host wait for the whole step, and the GPU for the host in the next one. So the
//! decision is made on the GPU: one kernel makes it from the sums of squares and the loss, the
//! optimizer's kernels read it, and the host reads it a step later.

use std::ops::Range;
use std::sync::OnceLock;

use cubecl::prelude::*;
use cubecl::server::Handle;
use kiln_collectives::{Buffer, BufferError, DType};

use super::backend::{StepBackend, StepSettings};
use super::kernels;
use super::loss_scale::LossScale;
use super::optimizer::{DeviceShard, Optimizer};
use crate::buffers::cube::{self, device_of, zeros};
use crate::buffers::{DeviceScalar, LossSum, Readback};
use crate::layout::{Layout, ParamGroupLayout};
use crate::mesh::Mesh;
use crate::param_group::ShardMut;

/// Elements of a segment, at most: what one cube works on.
const SEGMENT: usize = 1 << 14;

const VECTOR: usize = DeviceShard::VECTOR;
const THREADS: usize = DeviceShard::THREADS;
const DECISION: usize = DeviceShard::DECISION;

/// What a step came to, as the GPU has decided.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DecisionValues {
    pub(crate) loss: f32,
    pub(crate) norm: f32,
    pub(crate) applied: bool,
    /// Left out because scaled gradients were too large for their dtype.
    pub(crate) overflowed: bool,
    pub(crate) scale: LossScale,
}

/// Tables and state of optimizer steps on one GPU.
pub(crate) struct DeviceStep {
    client: Client,
    groups: Vec<Option<Segments>>,
    /// What the optimizer keeps from step to step; made at the first.
    state: OnceLock<Handle>,
    /// The scale of the loss, and the updates since it was changed.
    scale: Handle,
    /// What the newest update came to; zero before the first. The same memory at every step: a copy to the
    /// host that has been queued is made before the next step writes.
    decision: Handle,
    /// Updates before the first of this engine.
    updates: u64,
    scaled: bool,
    world_size: usize,
}

/// Part of a shard that belongs to one parameter and one chunk.
#[derive(Clone, Debug, PartialEq)]
struct Segment {
    /// Elements of the shard.
    range: Range<usize>,
    decays: bool,
    chunk: usize,
    /// Index of the parameter in its group.
    parameter: usize,
}

/// The segments of one group's shard, in order.
struct Segments {
    segments: Vec<Segment>,
    /// As [`DeviceShard::table`].
    table: Handle,
    /// First segment of each chunk, counted from the start of `chunks`, and the end of the last.
    bounds: Handle,
    chunks: Range<usize>,
}

/// Sums of squares of one step, one per segment, by position of the group.
pub(crate) type Sums = Vec<(usize, Buffer)>;

impl DeviceStep {
    /// For the shards that `rank` holds. `updates` have been made so far; `scale` is that of the loss,
    /// if it is scaled.
    pub(crate) fn new(
        client: &Client,
        layout: &Layout,
        rank: usize,
        updates: u64,
        scale: Option<LossScale>,
    ) -> Self {
        let LossScale { scale: factor, steps } = scale.unwrap_or(LossScale::NONE);
        let groups = layout.groups.iter();
        DeviceStep {
            client: client.clone(),
            groups: groups.map(|group| Segments::new(client, group, &layout.mesh, rank)).collect(),
            state: OnceLock::new(),
            scale: client.create_from_slice(bytemuck::bytes_of(&[factor as f32, steps as f32])),
            decision: client.create_from_slice(bytemuck::bytes_of(&[0.0f32; DECISION])),
            updates,
            scaled: scale.is_some(),
            world_size: layout.mesh.world_size(),
        }
    }

    /// The factor of the loss, if it has one.
    pub(crate) fn scale(&self) -> Option<DeviceScalar> {
        self.scaled.then(|| self.scale.clone().offset_end(size_of::<f32>() as u64))
    }

    /// Starts reading the newest decision: behind what the GPU has been given so far, and before what it
    /// will be given.
    pub(crate) fn read(&self) -> Readback {
        Readback::start(&self.client, self.decision.clone(), DType::F32, DECISION)
    }

    /// By parameter of the group at `position`: whether `sums` of this step holds a value that is not
    /// finite. Waits for the GPU.
    pub(crate) fn non_finite(
        &self,
        position: usize,
        sums: &Sums,
        parameters: usize,
    ) -> Result<Vec<bool>, BufferError> {
        let mut flags = vec![false; parameters];
        let sums = sums.iter().find(|(of, _)| *of == position);
        let (Some(segments), Some((_, sums))) = (&self.groups[position], sums) else {
            return Ok(flags);
        };
        let sums = sums.to_host()?;
        for (segment, sum) in segments.segments.iter().zip(sums.as_slice::<f32>()?) {
            flags[segment.parameter] |= !sum.is_finite();
        }
        Ok(flags)
    }
}

impl StepBackend for DeviceStep {
    /// The learning rate: what else is decided is known on the GPU alone.
    type Decision = f64;
    type Sums = Sums;

    fn loss(&self, sum: &mut LossSum) -> Result<Buffer, BufferError> {
        Ok(sum.device.take().unwrap_or_else(|| zeros(&self.client, DType::F32, 1)))
    }

    fn squares(&self, gradients: &[(usize, &Buffer)]) -> Result<(Buffer, Sums), BufferError> {
        let chunks = zeros(&self.client, DType::F32, self.world_size);
        let mut all = Sums::new();
        for (position, gradient) in gradients {
            let Some(segments) = &self.groups[*position] else { continue };
            let count = segments.segments.len();
            let sums = Buffer::empty_on(&self.client, DType::F32, count);
            if count > 0 {
                // SAFETY: the table lies inside the gradient, and there is a sum for every row of it.
                unsafe {
                    let values = device_of(gradient)?.handle().clone();
                    kernels::squares::launch_unchecked(
                        &self.client,
                        one_each(&self.client, count),
                        CubeDim::new_1d(THREADS as u32),
                        VECTOR,
                        // Shards are as long as whole vectors.
                        BufferArg::from_raw_parts(values, gradient.len() / VECTOR),
                        BufferArg::from_raw_parts(segments.table.clone(), count * 3),
                        whole(&sums)?,
                        THREADS,
                    );
                }
            }
            let held = segments.chunks.len();
            // SAFETY: the bounds lie inside the sums, and the chunks inside the world's.
            unsafe {
                kernels::chunks::launch_unchecked(
                    &self.client,
                    one_each(&self.client, held),
                    CubeDim::new_1d(THREADS as u32),
                    whole(&sums)?,
                    BufferArg::from_raw_parts(segments.bounds.clone(), held + 1),
                    whole(&chunks)?,
                    segments.chunks.start as u32,
                    THREADS,
                );
            }
            all.push((*position, sums));
        }
        Ok((chunks, all))
    }

    fn decide(
        &self,
        optimizer: &dyn Optimizer,
        loss: &Buffer,
        squares: &Buffer,
        settings: StepSettings,
    ) -> Result<f64, BufferError> {
        let StepSettings { learning_rate, max_norm } = settings;
        // SAFETY: the lengths are those that the kernel works with.
        unsafe {
            kernels::decide::launch_unchecked(
                &self.client,
                CubeCount::new_1d(1),
                CubeDim::new_1d(1),
                whole(squares)?,
                whole(loss)?,
                BufferArg::from_raw_parts(self.scale.clone(), 2),
                BufferArg::from_raw_parts(self.decision.clone(), DECISION),
                max_norm as f32,
                self.scaled,
            );
        }
        let state = || optimizer.device_state(&self.client, self.updates);
        let state = self.state.get_or_init(state);
        optimizer.prepare_on_device(&self.client, state, &self.decision, learning_rate);
        Ok(learning_rate)
    }

    fn leaves_out(_: &f64) -> bool {
        // Not known here: the kernels of the update ask the decision.
        false
    }

    fn update(
        &self,
        optimizer: &dyn Optimizer,
        (position, _): (usize, &ParamGroupLayout),
        shard: ShardMut<'_>,
        gradient: &Buffer,
        learning_rate: &f64,
    ) -> Result<(), BufferError> {
        let (Some(segments), Some(state)) = (&self.groups[position], self.state.get()) else {
            return Ok(());
        };
        if segments.segments.is_empty() {
            return Ok(());
        }
        let slots = shard.slots.iter().map(|slot| Ok(device_of(slot)?.handle()));
        optimizer.update_on_device(&DeviceShard {
            client: &self.client,
            weights: device_of(shard.weights)?.handle(),
            gradient: device_of(gradient)?.handle(),
            slots: slots.collect::<Result<_, BufferError>>()?,
            len: gradient.len(),
            table: &segments.table,
            segments: segments.segments.len(),
            decision: &self.decision,
            state,
            learning_rate: *learning_rate,
        });
        Ok(())
    }
}

impl DecisionValues {
    /// Waits for a decision that is being read.
    pub(crate) fn wait(readback: Readback) -> Result<Self, BufferError> {
        let values = readback.wait()?;
        let &[loss, norm, applied, _, scale, steps] = values.as_slice::<f32>()? else {
            unreachable!("invariant: a decision has six values, or reading it has failed");
        };
        Ok(DecisionValues {
            loss,
            norm,
            applied: applied > 0.0,
            overflowed: applied < 0.0,
            scale: LossScale { scale: f64::from(scale), steps: steps as u64 },
        })
    }
}

impl Segments {
    fn new(client: &Client, group: &ParamGroupLayout, mesh: &Mesh, rank: usize) -> Option<Self> {
        if !group.trainable {
            return None;
        }
        let shard = group.shard_range(mesh, rank);
        let segments = cut(group, &shard);
        let chunks = shard.start / group.chunk..shard.end / group.chunk;
        let table = segments.iter().flat_map(|segment| {
            let Range { start, end } = segment.range;
            [start / VECTOR, end.div_ceil(VECTOR), usize::from(segment.decays)]
        });
        let bounds = (chunks.start..=chunks.end)
            .map(|chunk| segments.partition_point(|segment| segment.chunk < chunk));
        let upload = |values: Vec<u32>| client.create_from_slice(bytemuck::cast_slice(&values));
        // Never nothing: kernels cannot be given that.
        let table = upload(table.map(|value| value as u32).chain([0; 3]).collect());
        let bounds = upload(bounds.map(|value| value as u32).collect());
        Some(Segments { segments, table, bounds, chunks })
    }
}

/// The segments of `shard` that belong to parameters, in order.
fn cut(group: &ParamGroupLayout, shard: &Range<usize>) -> Vec<Segment> {
    let mut segments = Vec::new();
    for (index, parameter) in group.parameters.iter().enumerate() {
        let (held, _) = parameter.held_by(shard);
        let mut start = held.start;
        while start < held.end {
            let chunk = (shard.start + start) / group.chunk;
            let end_of_chunk = (chunk + 1) * group.chunk - shard.start;
            let end = held.end.min(end_of_chunk).min(start + SEGMENT);
            let decays = parameter.decays();
            segments.push(Segment { range: start..end, decays, chunk, parameter: index });
            start = end;
        }
    }
    segments
}

/// A cube for each of `count`; there may be idle ones at the end.
fn one_each(client: &Client, count: usize) -> CubeCount {
    cubecl::calculate_cube_count_elemwise(client, count, CubeDim::new_1d(1))
}

/// All values of a buffer, as an argument.
///
/// # Safety
///
/// The kernel must not touch values behind those of the buffer.
unsafe fn whole(buffer: &Buffer) -> Result<BufferArg, BufferError> {
    // SAFETY: the caller's promise.
    Ok(unsafe { cube::whole(buffer, device_of(buffer)?) })
}
