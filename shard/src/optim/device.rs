//! An optimizer step on a GPU that does not block the host.
//!
//! Whether and how far weights move depends on the norm of the gradient over all ranks. If the host read the norm, it
//! would have to wait for the whole step, and the GPU would then be idle until the host had queued the next one. So
//! the GPU makes the decision: one kernel computes it from the sums of squares and the loss, the optimizer's kernels
//! read it, and the host reads it one step later.

use std::sync::OnceLock;

use cubecl::prelude::*;
use cubecl::server::Handle;
use kiln_collectives::{Buffer, BufferError, DType};

use super::backend::{GroupUpdate, StepBackend, StepSettings};
use super::kernels;
use super::loss_scale::LossScale;
use super::optimizer::{GroupRule, Optimizer};
use super::rule::{DeviceRule, DeviceShard, HalfDType, LearningRates, Settings, UpdateStep};
use super::segments::{Class, Segments};
use crate::buffers::cube::{self, device_of, zeros};
use crate::buffers::{DeviceScalar, LossSum, Readback};
use crate::layout::Layout;
use crate::param_group::ShardMut;

const VECTOR: usize = DeviceShard::VECTOR;
const THREADS: usize = DeviceShard::THREADS;
const DECISION: usize = DeviceShard::DECISION;

/// The outcome of a step, as decided by the GPU.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DecisionValues {
    pub(crate) loss: f32,
    pub(crate) norm: f32,
    pub(crate) applied: bool,
    /// True if the update was skipped because scaled gradients were too large for their dtype.
    pub(crate) overflowed: bool,
    pub(crate) scale: LossScale,
}

/// Tables and state of optimizer steps on one GPU.
pub(crate) struct DeviceStep {
    client: Client,
    groups: Vec<Option<Segments>>,
    /// The state of each rule for each learning rate, created at the first step; empty for host-only rules.
    states: OnceLock<Vec<Vec<Handle>>>,
    /// Number of distinct learning-rate schedules.
    schedules: usize,
    /// The scale of the loss, and the number of updates since the scale was changed.
    scale: Handle,
    /// The outcome of the latest update; zero before the first. Every step uses the same memory: the queued copy to
    /// the host runs before the next step overwrites it.
    decision: Handle,
    /// Number of updates made before this engine was built.
    updates: u64,
    scaled: bool,
    world_size: usize,
}

/// Position of each group and the sums of squares of its segments, for one step.
pub(crate) type Sums = Vec<(usize, Buffer)>;

impl DeviceStep {
    /// Creates the step for the shards that `rank` holds, updated by `rules`. `updates` have been made so far;
    /// `scale` is the loss scale, if there is one.
    pub(crate) fn new(
        client: &Client,
        layout: &Layout,
        rules: &[GroupRule],
        rank: usize,
        updates: u64,
        scale: Option<LossScale>,
    ) -> Self {
        let LossScale { scale: factor, steps } = scale.unwrap_or(LossScale::NONE);
        let schedules = rules.iter().flat_map(|rule| &rule.settings).map(|settings| settings.schedule);
        let groups = layout.groups.iter().zip(rules);
        let groups =
            groups.map(|(group, rule)| Segments::new(client, group, &rule.settings, &layout.mesh, rank));
        DeviceStep {
            client: client.clone(),
            groups: groups.collect(),
            states: OnceLock::new(),
            schedules: 1 + schedules.max().unwrap_or(0),
            scale: client.create_from_slice(bytemuck::bytes_of(&[factor as f32, steps as f32])),
            decision: client.create_from_slice(bytemuck::bytes_of(&[0.0f32; DECISION])),
            updates,
            scaled: scale.is_some(),
            world_size: layout.mesh.world_size(),
        }
    }

    /// Returns the loss scale, if there is one.
    pub(crate) fn scale(&self) -> Option<DeviceScalar> {
        self.scaled.then(|| self.scale.clone().offset_end(size_of::<f32>() as u64))
    }

    /// Starts to read the latest decision. The copy runs after the GPU work that was queued earlier, and before later
    /// work.
    pub(crate) fn read(&self) -> Readback {
        Readback::start(&self.client, self.decision.clone(), DType::F32, DECISION)
    }

    /// Returns, for each parameter of the group at `position`, whether `sums` of this step contains a value that is
    /// not finite. Waits for the GPU.
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

impl DeviceStep {
    /// Returns the state of a rule for each learning rate.
    fn states(&self, rule: usize) -> &[Handle] {
        self.states.get().map_or(&[], |states| &states[rule])
    }

    /// Returns the GPU rule of a group, the classes of its parameters, and the whole shard with the first learning
    /// rate; `None` if there is nothing to update.
    #[allow(clippy::type_complexity)]
    fn prepared<'a>(
        &'a self,
        group: GroupUpdate<'a>,
        shard: &'a ShardMut<'_>,
        gradient: &'a Buffer,
        rates: &LearningRates,
    ) -> Result<Option<(&'a dyn DeviceRule, &'a [Class], DeviceShard<'a>)>, BufferError> {
        let state = self.states(group.rule_index).first();
        let segments = self.groups[group.position].as_ref().filter(|group| !group.segments.is_empty());
        let (Some(rule), Some(state), Some(segments)) = (group.rule.on_device(), state, segments) else {
            return Ok(None);
        };
        let slots = shard.slots.iter().map(|slot| Ok(device_of(slot)?.handle()));
        let compute = shard.compute.as_ref().and_then(|compute| HalfDType::of(compute.dtype()));
        let shard = DeviceShard {
            client: &self.client,
            weights: device_of(&*shard.weights)?.handle(),
            // If the compute shard has a different dtype, it is cast from the weights before its next use.
            compute: match shard.compute.as_deref().zip(compute) {
                Some((compute, dtype)) => Some((device_of(compute)?.handle(), dtype)),
                None => None,
            },
            gradient: device_of(gradient)?.handle(),
            slots: slots.collect::<Result<_, BufferError>>()?,
            len: gradient.len(),
            table: &segments.table,
            segments: segments.segments.len(),
            decision: &self.decision,
            state,
            learning_rate: rates.of(0),
            settings: Settings::default(),
        };
        Ok(Some((rule, &segments.classes, shard)))
    }
}

impl StepBackend for DeviceStep {
    /// The learning rates: the other values are known only on the GPU.
    type Decision = LearningRates;
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
                        // Shards consist of whole vectors.
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
        optimizer: &Optimizer,
        loss: &Buffer,
        squares: &Buffer,
        settings: StepSettings,
    ) -> Result<LearningRates, BufferError> {
        let StepSettings { rates, max_norm } = settings;
        // SAFETY: the lengths are those that the kernel accesses.
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
        let rules = || optimizer.rules().map(|rule| rule.on_device());
        let state = |rule: &dyn DeviceRule| rule.state(&self.client, self.updates);
        let of_rule = |rule: Option<&dyn DeviceRule>| {
            rule.into_iter().flat_map(|rule| (0..self.schedules).map(move |_| state(rule))).collect()
        };
        let states = self.states.get_or_init(|| rules().map(of_rule).collect());
        for (rule, states) in rules().zip(states) {
            for (schedule, state) in states.iter().enumerate() {
                if let Some(rule) = rule {
                    rule.prepare(&self.client, state, &self.decision, rates.of(schedule));
                }
            }
        }
        Ok(rates)
    }

    fn leaves_out(_: &LearningRates) -> bool {
        // Unknown on the host: the kernels of the update read the decision.
        false
    }

    fn step_of(_: &LearningRates, _: &Settings) -> Option<UpdateStep> {
        // The number of the update is known only on the GPU.
        None
    }

    fn direct(
        &self,
        group: GroupUpdate<'_>,
        shard: ShardMut<'_>,
        gradient: &mut Buffer,
        rates: &LearningRates,
    ) -> Result<(), BufferError> {
        if let Some((rule, _, shard)) = self.prepared(group, &shard, gradient, rates)? {
            rule.direct(&shard);
        }
        Ok(())
    }

    fn update(
        &self,
        group: GroupUpdate<'_>,
        shard: ShardMut<'_>,
        gradient: &Buffer,
        rates: &LearningRates,
    ) -> Result<bool, BufferError> {
        let Some((rule, classes, shard)) = self.prepared(group, &shard, gradient, rates)? else {
            // There is nothing to update.
            return Ok(true);
        };
        for Class { settings, table, segments } in classes {
            let (settings, segments) = (*settings, *segments);
            let state = &self.states(group.rule_index)[settings.schedule];
            let learning_rate = rates.of(settings.schedule);
            rule.update(&DeviceShard { table, segments, state, learning_rate, settings, ..shard.clone() });
        }
        Ok(rule.writes_compute() && shard.compute.is_some())
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

/// Returns at least `count` cubes; surplus cubes are idle.
fn one_each(client: &Client, count: usize) -> CubeCount {
    cubecl::calculate_cube_count_elemwise(client, count, CubeDim::new_1d(1))
}

/// Passes all values of `buffer` to a kernel.
///
/// # Safety
///
/// The kernel must not access memory beyond the end of the buffer.
unsafe fn whole(buffer: &Buffer) -> Result<BufferArg, BufferError> {
    // SAFETY: guaranteed by the caller.
    Ok(unsafe { cube::whole(buffer, device_of(buffer)?) })
}
