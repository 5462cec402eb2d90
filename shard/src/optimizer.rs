//! AdamW in place on flat shards, the gradient norm, and clipping, as the host computes them. The loops
//! over elements are in [`flat`](crate::flat); a GPU does all of it by itself, see
//! [`Engine::update`](crate::Engine::update).

use std::ops::Range;

use kiln_collectives::{Buffer, Label, Phase};

use crate::engine::Engine;
use crate::error::ShardError;
use crate::flat;
use crate::layout::UnitLayout;
use crate::snapshot;
use crate::unit::{Moments, UnitState};

/// Settings of AdamW (Loshchilov and Hutter, 2019), as PyTorch computes it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Decoupled weight decay of matrices and embeddings; norms and biases do not decay.
    pub weight_decay: f64,
}

impl Default for AdamW {
    fn default() -> Self {
        AdamW { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1 }
    }
}

/// Factors of one step, the same for every element.
#[derive(Clone, Copy)]
pub(crate) struct Factors {
    pub(crate) clip: f32,
    pub(crate) beta1: f32,
    pub(crate) beta2: f32,
    pub(crate) epsilon: f32,
    /// Learning rate over the bias correction of the first moment.
    pub(crate) step_size: f32,
    /// Root of the bias correction of the second moment.
    pub(crate) second_root: f32,
}

impl AdamW {
    fn factors(&self, step: u64, learning_rate: f64, clip: f64) -> Factors {
        let correction = |beta: f64| 1.0 - beta.powf(step as f64);
        Factors {
            clip: clip as f32,
            beta1: self.beta1 as f32,
            beta2: self.beta2 as f32,
            epsilon: self.epsilon as f32,
            step_size: (learning_rate / correction(self.beta1)) as f32,
            second_root: correction(self.beta2).sqrt() as f32,
        }
    }
}

/// The factor that brings a gradient of norm `norm` down to `max_norm`, as PyTorch computes it;
/// 1 when `max_norm` is 0 (no clipping) or the norm is small enough.
pub fn clip_factor(norm: f64, max_norm: f64) -> f64 {
    if max_norm > 0.0 { (max_norm / (norm + 1e-6)).min(1.0) } else { 1.0 }
}

impl Engine {
    /// The 2-norm of the reduced gradient of all trainable parameters. Each rank sums the pieces
    /// that it holds; pieces are the same under every strategy and are added in order, so the
    /// norm has the same bits under every strategy. Collective: one all-reduce over the shard
    /// axis, none over the replicas, which hold the same gradient.
    pub fn grad_norm(&self) -> Result<f64, ShardError> {
        let runtime = self.runtime();
        let mut sums = vec![0.0f64; runtime.mesh.world_size()];
        for unit in self.units() {
            let state = unit.state();
            let Some(gradient) = &state.reduced else { continue };
            let start = unit.layout.shard_range(&runtime.mesh, runtime.rank).start;
            let first = start / unit.layout.piece;
            let gradient = flat::on_host(gradient)?;
            let pieces = flat::sums_of_squares(&gradient, unit.layout.piece)?;
            for (sum, piece) in sums[first..].iter_mut().zip(pieces) {
                *sum += piece;
            }
        }
        if let Some(group) = &runtime.shard {
            let label = Label::new("grad_norm", Phase::Optimizer);
            // Pieces of other ranks are zero here, so the all-reduce adds nothing to any piece.
            let work = group.all_reduce(label, Buffer::from_slice(&sums));
            if let Some(all) = runtime.wait(work) {
                sums.copy_from_slice(all.as_slice()?);
            }
        }
        runtime.check()?;
        Ok(sums.iter().sum::<f64>().sqrt())
    }

    /// The first trainable parameter, in layout order, whose reduced gradient holds a value that
    /// is not finite on any rank. Collective.
    pub fn first_non_finite_gradient(&self) -> Result<Option<String>, ShardError> {
        let runtime = self.runtime();
        let mut flags = Vec::new();
        for unit in self.units().iter().filter(|unit| unit.layout.trainable) {
            let state = unit.state();
            let shard = unit.layout.shard_range(&runtime.mesh, runtime.rank);
            let gradient = state.reduced.as_ref().map(flat::on_host).transpose()?;
            for parameter in &unit.layout.parameters {
                let (held, _) = parameter.held_by(&shard);
                let bad = match &gradient {
                    Some(gradient) => {
                        gradient.as_slice::<f32>()?[held].iter().any(|value| !value.is_finite())
                    }
                    None => false,
                };
                flags.push(f64::from(u8::from(bad)));
            }
        }
        self.first_flagged(&flags)
    }

    /// Updates this rank's shards in place with the reduced gradient times `clip` and frees the
    /// gradient. `step` counts from 1. On the host.
    pub(crate) fn step(
        &self,
        optimizer: &AdamW,
        step: u64,
        learning_rate: f64,
        clip: f64,
    ) -> Result<(), ShardError> {
        let factors = optimizer.factors(step, learning_rate, clip);
        let keep = (1.0 - learning_rate * optimizer.weight_decay) as f32;
        for unit in self.units() {
            let mut state = unit.state();
            let Some(gradient) = state.reduced.take() else { continue };
            let UnitState { master, moments, snapshot, .. } = &mut *state;
            let moments = moments.get_or_insert_with(|| Moments::like(&gradient));
            let own = |buffer| snapshot::own(buffer, snapshot, &unit.layout);
            let (weights, first) = (own(master)?, own(&mut moments.first)?);
            let second = own(&mut moments.second)?;
            let shard = unit.layout.shard_range(&self.mesh(), self.runtime().rank);
            for (range, decays) in decay_groups(&unit.layout, &shard) {
                let keep = if decays { keep } else { 1.0 };
                flat::update([weights, first, second], &gradient, range, factors, keep)?;
            }
            // Goes up while the next unit is updated.
            unit.refresh(&mut state)?;
        }
        Ok(())
    }
}

/// What of `shard` belongs to parameters, and whether it decays; neighbours of a kind are merged.
/// Alignment gaps are left out: they stay zero.
fn decay_groups(layout: &UnitLayout, shard: &Range<usize>) -> Vec<(Range<usize>, bool)> {
    let mut groups: Vec<(Range<usize>, bool)> = Vec::new();
    for parameter in &layout.parameters {
        let (range, _) = parameter.held_by(shard);
        if range.is_empty() {
            continue;
        }
        match groups.last_mut() {
            Some((last, decays)) if last.end == range.start && *decays == parameter.decays() => {
                last.end = range.end;
            }
            _ => groups.push((range, parameter.decays())),
        }
    }
    groups
}
