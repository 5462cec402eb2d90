//! Muon.

use burn::tensor::Tensor;
use rayon::prelude::*;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

#[cfg(feature = "cube")]
use super::kernels;
use super::newton_schulz::orthogonalized;
#[cfg(feature = "cube")]
use super::rule::{DeviceRule, DeviceShard};
use super::rule::{DirectionRun, Rule, Settings, ShardRun, UpdateStep};
use crate::buffers::host::TASK;

/// Muon (Jordan et al., 2024), with PyTorch's formulas: orthogonalises the momentum of each matrix. For matrices
/// `[d_in, d_out]`, and for batches of them, such as `[experts, d_in, d_out]`. Computes in f32; on NVIDIA GPUs,
/// matrix products use TF32.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Muon {
    /// Factor for the learning rate of a step.
    pub learning_rate: f64,
    /// Fraction of the momentum that is kept in a step.
    pub momentum: f64,
    /// True if the direction is a blend of gradient and momentum (Nesterov), false for momentum alone.
    pub nesterov: bool,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Number of Newton–Schulz iterations.
    pub ns_steps: usize,
    /// Coefficients of the Newton–Schulz polynomial.
    pub ns_coefficients: [f64; 3],
    /// Adjustment of the learning rate to the shape of a matrix.
    pub adjust_lr: AdjustLr,
}

/// Adjustment of Muon's learning rate to the shape `[d_in, d_out]` of a matrix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AdjustLr {
    /// Times √max(1, `d_out` / `d_in`) (Jordan et al., 2024).
    #[default]
    Original,
    /// Times 0.2 √max(`d_in`, `d_out`), so that updates are as large as AdamW's (Liu et al., 2025).
    MatchRmsAdamw,
}

impl AdjustLr {
    fn factor(self, d_in: usize, d_out: usize) -> f64 {
        match self {
            AdjustLr::Original => (d_out as f64 / d_in as f64).max(1.0).sqrt(),
            AdjustLr::MatchRmsAdamw => 0.2 * (d_in.max(d_out) as f64).sqrt(),
        }
    }
}

impl Default for Muon {
    fn default() -> Self {
        Muon {
            learning_rate: 1.0,
            momentum: 0.95,
            nesterov: true,
            weight_decay: 0.1,
            ns_steps: 5,
            ns_coefficients: [3.4445, -4.7750, 2.0315],
            adjust_lr: AdjustLr::default(),
        }
    }
}

impl Muon {
    /// PyTorch's name of the slot.
    pub const SLOTS: [&'static str; 1] = ["momentum_buffer"];
}

impl Rule for Muon {
    fn name(&self) -> &str {
        "muon"
    }

    fn slots(&self) -> &[&'static str] {
        &Muon::SLOTS
    }

    fn settings(&self, shape: &[usize]) -> Settings {
        let scale = match *shape {
            [.., d_in, d_out] => self.adjust_lr.factor(d_in, d_out),
            _ => 1.0,
        };
        let (learning_rate, weight_decay) = (self.learning_rate, self.weight_decay);
        Settings { learning_rate, weight_decay, scale, ..Settings::default() }
    }

    fn is_whole(&self) -> bool {
        true
    }

    fn direct(&self, step: &UpdateStep, mut run: DirectionRun<'_>) {
        let [momentum] = &mut run.slots[..] else {
            unreachable!("invariant: a rule is given the slots that it names");
        };
        let (clip, kept, nesterov) = (step.gradient_factor as f32, self.momentum as f32, self.nesterov);
        let arch = pulp::Arch::new();
        run.gradient.par_chunks_mut(TASK).zip(momentum.par_chunks_mut(TASK)).for_each(
            |(gradient, momentum)| {
                arch.dispatch(
                    #[inline(always)]
                    || direct_task(gradient, momentum, clip, kept, nesterov),
                );
            },
        );
    }

    fn transform(&self, matrices: Tensor<3>) -> Tensor<3> {
        orthogonalized(matrices, self.ns_steps, self.ns_coefficients)
    }

    fn update(&self, step: &UpdateStep, run: ShardRun<'_>) {
        let Settings { learning_rate, scale, .. } = run.settings;
        let rate = (step.learning_rate * learning_rate * scale) as f32;
        let kept = run.settings.kept(step.learning_rate);
        let arch = pulp::Arch::new();
        run.weights.par_chunks_mut(TASK).zip(run.gradient.par_chunks(TASK)).for_each(|(weights, updates)| {
            arch.dispatch(
                #[inline(always)]
                || {
                    for (weight, update) in weights.iter_mut().zip(updates) {
                        *weight = *weight * kept - rate * update;
                    }
                },
            );
        });
    }

    #[cfg(feature = "cube")]
    fn on_device(&self) -> Option<&dyn DeviceRule> {
        Some(self)
    }
}

#[cfg(feature = "cube")]
impl DeviceRule for Muon {
    fn direct(&self, shard: &DeviceShard<'_>) {
        use cubecl::prelude::*;
        let [momentum] = shard.slots[..] else {
            unreachable!("invariant: a rule is given the slots that it names");
        };
        let vectors = shard.len / DeviceShard::VECTOR;
        let (client, count) = (shard.client, shard.segments);
        // SAFETY: both have `len` elements, and the table lies inside them; `len` is a multiple of the vector
        // length.
        unsafe {
            kernels::muon_direction::launch_unchecked(
                client,
                cubecl::calculate_cube_count_elemwise(client, count, CubeDim::new_1d(1)),
                CubeDim::new_1d(DeviceShard::THREADS as u32),
                DeviceShard::VECTOR,
                BufferArg::from_raw_parts(shard.gradient.clone(), vectors),
                BufferArg::from_raw_parts(momentum.clone(), vectors),
                BufferArg::from_raw_parts(shard.table.clone(), count * 3),
                BufferArg::from_raw_parts(shard.decision.clone(), DeviceShard::DECISION),
                self.momentum as f32,
                self.nesterov,
                DeviceShard::THREADS,
            );
        }
    }

    fn update(&self, shard: &DeviceShard<'_>) {
        use cubecl::prelude::*;
        let Settings { learning_rate, scale, .. } = shard.settings;
        let vectors = shard.len / DeviceShard::VECTOR;
        let (client, count) = (shard.client, shard.segments);
        // SAFETY: as above.
        unsafe {
            kernels::muon::launch_unchecked(
                client,
                cubecl::calculate_cube_count_elemwise(client, count, CubeDim::new_1d(1)),
                CubeDim::new_1d(DeviceShard::THREADS as u32),
                DeviceShard::VECTOR,
                BufferArg::from_raw_parts(shard.weights.clone(), vectors),
                BufferArg::from_raw_parts(shard.gradient.clone(), vectors),
                BufferArg::from_raw_parts(shard.table.clone(), count * 3),
                BufferArg::from_raw_parts(shard.decision.clone(), DeviceShard::DECISION),
                shard.settings.kept(shard.learning_rate),
                (shard.learning_rate * learning_rate * scale) as f32,
                DeviceShard::THREADS,
            );
        }
    }
}

/// Updates the momentum of a task's elements from their gradient, and computes directions from both.
#[inline(always)]
fn direct_task(gradient: &mut [f32], momentum: &mut [f32], clip: f32, kept: f32, nesterov: bool) {
    let new = 1.0 - kept;
    for (gradient, momentum) in gradient.iter_mut().zip(momentum) {
        let clipped = *gradient * clip;
        *momentum += new * (clipped - *momentum);
        *gradient = if nesterov { *momentum - new * (*momentum - clipped) } else { *momentum };
    }
}
