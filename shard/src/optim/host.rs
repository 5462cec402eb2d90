//! The end of a step, computed by the host.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use kiln_collectives::{Buffer, BufferError};

use super::backend::{GroupUpdate, StepBackend, StepSettings};
use super::optimizer::Optimizer;
use super::rule::{DirectionRun, LearningRates, Settings, ShardRun, UpdateStep};
use crate::buffers::{LossSum, host, on_host};
use crate::layout::{Layout, ParamGroupLayout};
use crate::param_group::ShardMut;

/// Returns the factor that scales a gradient of norm `norm` down to `max_norm`, as PyTorch computes it; 1 if
/// `max_norm` is 0 (no clipping) or the norm is small enough.
pub fn clip_factor(norm: f64, max_norm: f64) -> f64 {
    if max_norm > 0.0 { (max_norm / (norm + 1e-6)).min(1.0) } else { 1.0 }
}

/// Steps on the host.
pub(crate) struct HostStep<'a> {
    pub(crate) layout: &'a Layout,
    pub(crate) rank: usize,
    /// Number of updates made.
    pub(crate) updates: &'a AtomicU64,
}

/// The host's decision.
pub(crate) struct HostDecision {
    pub(crate) loss: f64,
    pub(crate) norm: f64,
    rates: LearningRates,
    /// The step of parameters with the first learning rate; `None` if the loss or the norm is not finite.
    step: Option<UpdateStep>,
}

impl HostDecision {
    pub(crate) fn applied(&self) -> bool {
        self.step.is_some()
    }

    /// Returns the step of parameters with these settings, if there is one.
    fn step_of(&self, settings: &Settings) -> Option<UpdateStep> {
        self.step.map(|step| UpdateStep { learning_rate: self.rates.of(settings.schedule), ..step })
    }
}

/// Returns the 2-norm of all chunks together.
pub(crate) fn norm(squares: &Buffer) -> Result<f64, BufferError> {
    Ok(squares.as_slice::<f64>()?.iter().sum::<f64>().sqrt())
}

impl HostStep<'_> {
    fn shard(&self, layout: &ParamGroupLayout) -> Range<usize> {
        layout.shard_range(&self.layout.mesh, self.rank)
    }
}

impl StepBackend for HostStep<'_> {
    type Decision = HostDecision;
    // The host inspects the gradients themselves.
    type Sums = ();

    fn loss(&self, sum: &mut LossSum) -> Result<Buffer, BufferError> {
        Ok(Buffer::from_slice(&[sum.read()?]))
    }

    fn squares(&self, gradients: &[(usize, &Buffer)]) -> Result<(Buffer, ()), BufferError> {
        let mut sums = vec![0.0f64; self.layout.mesh.world_size()];
        for (position, gradient) in gradients {
            let layout = &self.layout.groups[*position];
            let first = self.shard(layout).start / layout.chunk;
            let gradient = on_host(gradient)?;
            let chunks = gradient.as_slice::<f32>()?.chunks(layout.chunk);
            for (sum, chunk) in sums[first..].iter_mut().zip(chunks) {
                *sum += host::sum_of_squares(chunk);
            }
        }
        Ok((Buffer::from_slice(&sums), ()))
    }

    fn decide(
        &self,
        _optimizer: &Optimizer,
        loss: &Buffer,
        squares: &Buffer,
        settings: StepSettings,
    ) -> Result<HostDecision, BufferError> {
        let (loss, norm) = (loss.as_slice::<f64>()?[0], norm(squares)?);
        let applies = loss.is_finite() && norm.is_finite();
        let step = applies.then(|| UpdateStep {
            step: self.updates.fetch_add(1, Ordering::Relaxed) + 1,
            learning_rate: settings.rates.of(0),
            gradient_factor: clip_factor(norm, settings.max_norm),
        });
        Ok(HostDecision { loss, norm, rates: settings.rates, step })
    }

    fn leaves_out(decision: &HostDecision) -> bool {
        !decision.applied()
    }

    fn step_of(decision: &HostDecision, settings: &Settings) -> Option<UpdateStep> {
        decision.step_of(settings)
    }

    fn direct(
        &self,
        group: GroupUpdate<'_>,
        mut shard: ShardMut<'_>,
        gradient: &mut Buffer,
        decision: &HostDecision,
    ) -> Result<(), BufferError> {
        let gradient = gradient.as_mut_slice::<f32>()?;
        let mut slots = slices(&mut shard.slots)?;
        for (range, settings) in runs(group, &self.shard(group.layout)) {
            let Some(step) = decision.step_of(&settings) else { return Ok(()) };
            let slots = slots.iter_mut().map(|slot| &mut slot[range.clone()]).collect();
            group.rule.direct(&step, DirectionRun { gradient: &mut gradient[range], slots });
        }
        Ok(())
    }

    fn update(
        &self,
        group: GroupUpdate<'_>,
        mut shard: ShardMut<'_>,
        gradient: &Buffer,
        decision: &HostDecision,
    ) -> Result<bool, BufferError> {
        let (weights, gradient) = (shard.weights.as_mut_slice::<f32>()?, gradient.as_slice::<f32>()?);
        let mut slots = slices(&mut shard.slots)?;
        for (range, settings) in runs(group, &self.shard(group.layout)) {
            let Some(step) = decision.step_of(&settings) else { return Ok(false) };
            let slots = slots.iter_mut().map(|slot| &mut slot[range.clone()]).collect();
            let (weights, gradient) = (&mut weights[range.clone()], &gradient[range]);
            group.rule.update(&step, ShardRun { weights, gradient, slots, settings });
        }
        Ok(false)
    }
}

fn slices<'a>(slots: &'a mut [&mut Buffer]) -> Result<Vec<&'a mut [f32]>, BufferError> {
    slots.iter_mut().map(|slot| slot.as_mut_slice::<f32>()).collect()
}

/// Returns the ranges of `shard` that belong to parameters, and their settings; adjacent ranges with the same
/// settings are merged. Alignment gaps are skipped: they stay zero.
fn runs(group: GroupUpdate<'_>, shard: &Range<usize>) -> Vec<(Range<usize>, Settings)> {
    let mut runs: Vec<(Range<usize>, Settings)> = Vec::new();
    for (parameter, settings) in group.layout.parameters.iter().zip(group.settings) {
        let (range, _) = parameter.held_by(shard);
        if range.is_empty() {
            continue;
        }
        match runs.last_mut() {
            Some((last, of_last)) if last.end == range.start && of_last == settings => {
                last.end = range.end;
            }
            _ => runs.push((range, *settings)),
        }
    }
    runs
}
