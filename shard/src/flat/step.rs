//! An optimizer step on a GPU that nothing on the host waits for.
//!
//! Whether and how far weights move depends on the norm of the gradient over all ranks. Reading it
//! would make the host wait for the whole step, and the GPU for the host in the next one. So the
//! decision is made on the GPU: one kernel turns sums of squares and the loss into the factors of
//! the update, AdamW reads them from there, and the host reads them a step later.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use cubecl::prelude::*;
use cubecl::server::Handle;
use kiln_collectives::{Buffer, BufferError, DType};

use super::Reading;
use super::cube::{UNITS, device_of, zeros};
use super::step_kernels as kernels;
use crate::layout::UnitLayout;
use crate::mesh::Mesh;
use crate::optimizer::AdamW;
use crate::update::LossScale;

/// Elements of a segment, at most: what one cube works on.
const SEGMENT: usize = 1 << 14;

/// Elements that a unit reads at once. All parameters start at multiples of it, and what is between
/// them is zero.
const VECTOR: usize = 4;

/// Values of a decision, see [`Decision`].
const DECISION: usize = 8;

/// What a step came to, as the GPU has decided.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Decision {
    pub(crate) loss: f32,
    pub(crate) norm: f32,
    pub(crate) applied: bool,
    /// Left out because scaled gradients were too large for their dtype.
    pub(crate) overflowed: bool,
    pub(crate) scale: LossScale,
}

/// Settings of one update.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) adamw: AdamW,
    pub(crate) learning_rate: f64,
    pub(crate) max_norm: f64,
}

/// Tables and state of optimizer steps on one GPU.
pub(crate) struct DeviceStep {
    client: Client,
    units: Vec<Option<Segments>>,
    /// The betas to the power of the updates so far.
    powers: Handle,
    /// The scale of the loss, and the updates since it was changed.
    scale: Handle,
    /// What the newest update came to; zero before the first. The same memory at every step: a copy to the
    /// host that has been queued is made before the next step writes.
    decision: Handle,
    /// Updates before the first of this engine, and whether that has been.
    updates: u64,
    started: AtomicBool,
    scaled: bool,
    world_size: usize,
}

/// A part of a shard that belongs to one parameter and one piece.
#[derive(Clone, Debug, PartialEq)]
struct Segment {
    /// Elements of the shard.
    range: Range<usize>,
    decays: bool,
    piece: usize,
    /// Place of the parameter in its unit.
    parameter: usize,
}

/// The segments of one unit's shard, in order.
struct Segments {
    segments: Vec<Segment>,
    /// Start, end (in vectors) and whether it decays, per segment.
    table: Handle,
    /// First segment of each piece, counted from `first_piece`, and the end of the last.
    bounds: Handle,
    pieces: Range<usize>,
}

/// Sums of squares of one step, one per segment, by unit.
pub(crate) type Sums = Vec<(usize, Buffer)>;

impl DeviceStep {
    /// For the shards that `rank` of `mesh` holds of `units`. `updates` have been made so far; `scale`
    /// is that of the loss, if it is scaled.
    pub(crate) fn new<'a>(
        client: &Client,
        units: impl Iterator<Item = &'a UnitLayout>,
        mesh: &Mesh,
        rank: usize,
        updates: u64,
        scale: Option<LossScale>,
    ) -> Self {
        let LossScale { scale: factor, steps } = scale.unwrap_or(LossScale::NONE);
        let pair = |values: [f32; 2]| client.create_from_slice(bytemuck::cast_slice(&values));
        let units = units.map(|unit| Segments::new(client, unit, mesh, rank)).collect();
        DeviceStep {
            client: client.clone(),
            units,
            powers: pair([1.0, 1.0]),
            scale: pair([factor as f32, steps as f32]),
            decision: client.create_from_slice(bytemuck::bytes_of(&[0.0f32; DECISION])),
            updates,
            started: AtomicBool::new(false),
            scaled: scale.is_some(),
            world_size: mesh.world_size(),
        }
    }

    /// Memory that begins with the factor of the loss, if it has one.
    pub(crate) fn scale(&self) -> Option<Handle> {
        self.scaled.then(|| self.scale.clone().offset_end(size_of::<f32>() as u64))
    }

    /// The sums of squares of all gradients, by piece, `[world_size]`; those of pieces that this rank
    /// does not hold are zero. And the same by segment.
    pub(crate) fn squares<'a>(
        &self,
        gradients: impl Iterator<Item = (usize, &'a Buffer)>,
    ) -> Result<(Buffer, Sums), BufferError> {
        let pieces = zeros(&self.client, DType::F32, self.world_size);
        let mut all = Sums::new();
        for (position, gradient) in gradients {
            let Some(segments) = &self.units[position] else { continue };
            let count = segments.segments.len();
            let sums = Buffer::empty_on(&self.client, DType::F32, count);
            if count > 0 {
                // SAFETY: the table lies inside the gradient, and there is a sum for every row of it.
                unsafe {
                    kernels::squares::launch_unchecked(
                        &self.client,
                        one_each(&self.client, count),
                        CubeDim::new_1d(UNITS as u32),
                        VECTOR,
                        vectors(gradient)?,
                        BufferArg::from_raw_parts(segments.table.clone(), count * 3),
                        whole(&sums)?,
                        UNITS,
                    );
                }
            }
            let held = segments.pieces.len();
            // SAFETY: the bounds lie inside the sums, and the pieces inside the world's.
            unsafe {
                kernels::pieces::launch_unchecked(
                    &self.client,
                    one_each(&self.client, held),
                    CubeDim::new_1d(UNITS as u32),
                    whole(&sums)?,
                    BufferArg::from_raw_parts(segments.bounds.clone(), held + 1),
                    whole(&pieces)?,
                    segments.pieces.start as u32,
                    UNITS,
                );
            }
            all.push((position, sums));
        }
        Ok((pieces, all))
    }

    /// Decides on the update: `loss` (f32, `[1]`) and `pieces` are those of all ranks. Counts it if
    /// it is to be made.
    pub(crate) fn decide(
        &self,
        pieces: &Buffer,
        loss: &Buffer,
        settings: &Settings,
    ) -> Result<Handle, BufferError> {
        let decision = &self.decision;
        let Settings { adamw, learning_rate, max_norm } = settings;
        // The kernel counts on from here.
        let first = !self.started.swap(true, Ordering::Relaxed);
        let power = |beta: f64| if first { power(beta as f32, self.updates) } else { 1.0 };
        // SAFETY: the lengths are those that the kernel works with.
        unsafe {
            kernels::decide::launch_unchecked(
                &self.client,
                CubeCount::new_1d(1),
                CubeDim::new_1d(1),
                whole(pieces)?,
                whole(loss)?,
                BufferArg::from_raw_parts(self.powers.clone(), 2),
                BufferArg::from_raw_parts(self.scale.clone(), 2),
                BufferArg::from_raw_parts(decision.clone(), DECISION),
                adamw.beta1 as f32,
                adamw.beta2 as f32,
                power(adamw.beta1),
                power(adamw.beta2),
                *learning_rate as f32,
                *max_norm as f32,
                self.scaled,
            );
        }
        Ok(decision.clone())
    }

    /// One AdamW step of the shard of the unit at `position`, if `decision` says so.
    pub(crate) fn update(
        &self,
        position: usize,
        [weights, first, second]: [&mut Buffer; 3],
        gradient: &Buffer,
        decision: &Handle,
        settings: &Settings,
    ) -> Result<(), BufferError> {
        let Some(segments) = &self.units[position] else { return Ok(()) };
        let count = segments.segments.len();
        if count == 0 {
            return Ok(());
        }
        let Settings { adamw, learning_rate, .. } = settings;
        // SAFETY: all four are as long as the shard, which the table lies inside of.
        unsafe {
            kernels::adamw::launch_unchecked(
                &self.client,
                one_each(&self.client, count),
                CubeDim::new_1d(UNITS as u32),
                VECTOR,
                vectors(weights)?,
                vectors(first)?,
                vectors(second)?,
                vectors(gradient)?,
                BufferArg::from_raw_parts(segments.table.clone(), count * 3),
                BufferArg::from_raw_parts(decision.clone(), DECISION),
                adamw.beta1 as f32,
                adamw.beta2 as f32,
                adamw.epsilon as f32,
                (1.0 - learning_rate * adamw.weight_decay) as f32,
                UNITS,
            );
        }
        Ok(())
    }

    /// Starts reading a decision: behind what the GPU has been given so far, and before what it will
    /// be given.
    pub(crate) fn read(&self, decision: Handle) -> Reading {
        Reading::start(&self.client, decision, DType::F32, DECISION)
    }

    /// By parameter of the unit at `position`: whether `sums` of this step holds a value that is not
    /// finite. Waits for the GPU.
    pub(crate) fn non_finite(
        &self,
        position: usize,
        sums: &Buffer,
        parameters: usize,
    ) -> Result<Vec<bool>, BufferError> {
        let mut flags = vec![false; parameters];
        let Some(segments) = &self.units[position] else { return Ok(flags) };
        let sums = sums.to_host()?;
        for (segment, sum) in segments.segments.iter().zip(sums.as_slice::<f32>()?) {
            flags[segment.parameter] |= !sum.is_finite();
        }
        Ok(flags)
    }
}

impl Decision {
    /// Waits for it.
    pub(crate) fn wait(reading: Reading) -> Result<Self, BufferError> {
        let values = reading.wait()?;
        let &[loss, norm, applied, _, _, _, scale, steps] = values.as_slice::<f32>()? else {
            unreachable!("invariant: a decision has eight values, or reading it has failed");
        };
        Ok(Decision {
            loss,
            norm,
            applied: applied > 0.0,
            overflowed: applied < 0.0,
            scale: LossScale { scale: f64::from(scale), steps: steps as u64 },
        })
    }
}

impl Segments {
    fn new(client: &Client, unit: &UnitLayout, mesh: &Mesh, rank: usize) -> Option<Self> {
        if !unit.trainable {
            return None;
        }
        let shard = unit.shard_range(mesh, rank);
        let segments = cut(unit, &shard);
        let pieces = shard.start / unit.piece..shard.end / unit.piece;
        let table = segments.iter().flat_map(|segment| {
            let Range { start, end } = segment.range;
            [start / VECTOR, end.div_ceil(VECTOR), usize::from(segment.decays)]
        });
        let bounds = (pieces.start..=pieces.end)
            .map(|piece| segments.partition_point(|segment| segment.piece < piece));
        let upload = |values: Vec<u32>| client.create_from_slice(bytemuck::cast_slice(&values));
        // Never nothing: kernels cannot be given that.
        let table = upload(table.map(|value| value as u32).chain([0; 3]).collect());
        let bounds = upload(bounds.map(|value| value as u32).collect());
        Some(Segments { segments, table, bounds, pieces })
    }
}

/// `beta` to the power of `updates`, with the roundings of the kernel that multiplies once per update: a run
/// that goes on has the same bits.
fn power(beta: f32, updates: u64) -> f32 {
    let mut power = 1.0;
    for _ in 0..updates {
        power *= beta;
        if power == 0.0 {
            break;
        }
    }
    power
}

/// The parts of `shard` that belong to parameters, in order.
fn cut(unit: &UnitLayout, shard: &Range<usize>) -> Vec<Segment> {
    let mut segments = Vec::new();
    for (index, parameter) in unit.parameters.iter().enumerate() {
        let (held, _) = parameter.held_by(shard);
        let mut start = held.start;
        while start < held.end {
            let piece = (shard.start + start) / unit.piece;
            let end_of_piece = (piece + 1) * unit.piece - shard.start;
            let end = held.end.min(end_of_piece).min(start + SEGMENT);
            let decays = parameter.decays();
            segments.push(Segment { range: start..end, decays, piece, parameter: index });
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
    let handle = device_of(buffer)?.handle().clone();
    // SAFETY: the memory has room for as many; the rest is up to the caller.
    Ok(unsafe { BufferArg::from_raw_parts(handle, buffer.len()) })
}

/// [`whole`], for kernels that read vectors. Shards are as long as whole vectors.
///
/// # Safety
///
/// As [`whole`].
unsafe fn vectors(buffer: &Buffer) -> Result<BufferArg, BufferError> {
    let handle = device_of(buffer)?.handle().clone();
    // SAFETY: the memory has room for as many; the rest is up to the caller.
    Ok(unsafe { BufferArg::from_raw_parts(handle, buffer.len() / VECTOR) })
}
