//! The end of a step: the loss over all ranks, the norm of the gradient, clipping, and the optimizer, which is
//! skipped if the loss or the norm is not finite.
//!
//! On the host, or with offload, the update is complete when [`Engine::update`] returns. A GPU decides by itself
//! whether to update, without blocking the host; call [`Engine::outcome`] later, when the GPU has finished.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use kiln_collectives::{Buffer, Communicator, Label, Phase};

use super::core::Engine;
use crate::buffers::{DeviceScalar, on_host};
#[cfg(feature = "cube")]
use crate::buffers::{Placement, Readback};
use crate::error::ShardError;
use crate::memory;
#[cfg(feature = "cube")]
use crate::optim::{DecisionValues, DeviceStep, Sums};
use crate::optim::{HostStep, LearningRates, LossScale, StepBackend, StepSettings, norm};
use crate::sync::lock;

/// The outcome of a step; the same on all ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Sum of the losses passed to [`Engine::backward`], over all ranks.
    pub loss: f64,
    /// 2-norm of the gradient before clipping; the norm that clipping uses.
    pub grad_norm: f64,
    /// True if weights and optimizer state were updated, because the loss and the norm are finite.
    pub applied: bool,
    /// True if the update was skipped because the loss scale was too large; see [`LossScale`]. The scale has been
    /// reduced, and training can continue.
    pub overflowed: bool,
    /// The first trainable parameter, in layout order, whose gradient is not finite, if this is why the update was
    /// skipped.
    pub non_finite: Option<String>,
    /// The loss scale for the next step.
    pub loss_scale: Option<LossScale>,
}

/// An update that has been started, and whose outcome may not be known yet.
#[must_use]
pub struct Update(State);

enum State {
    Known(Outcome),
    #[cfg(feature = "cube")]
    OnDevice {
        readback: Readback,
        sums: Sums,
    },
}

impl Engine {
    /// Sets the number of updates made so far and the loss scale when a run is resumed. Must be called before the
    /// first step.
    pub fn resume(&self, updates: u64, scale: Option<LossScale>) {
        self.updates.store(updates, Ordering::Relaxed);
        *lock(&self.first_scale) = scale;
    }

    /// Clips the gradient to the norm `max_norm` (0 for no clipping) and updates this rank's shards in place with the
    /// optimizer that the engine was built with, unless the loss or the norm is not finite. Pass a number to use one
    /// learning rate for all parameters, or [`LearningRates`] for separate schedules. Collective.
    pub fn update(
        &self,
        learning_rates: impl Into<LearningRates>,
        max_norm: f64,
    ) -> Result<Update, ShardError> {
        self.context.check()?;
        let settings = StepSettings { rates: learning_rates.into(), max_norm };
        #[cfg(feature = "cube")]
        if let Some(step) = self.device_step() {
            let (_, sums) = self.update_with(step, settings)?;
            return Ok(Update(State::OnDevice { readback: step.read(), sums }));
        }
        self.context.keep_awake();
        let (decision, ()) = self.update_with(&self.host_step(), settings)?;
        let applied = decision.applied();
        let non_finite = if applied { None } else { self.first_non_finite_gradient()? };
        memory::use_huge_pages();
        Ok(Update(State::Known(Outcome {
            loss: decision.loss,
            grad_norm: decision.norm,
            applied,
            overflowed: false,
            non_finite,
            loss_scale: None,
        })))
    }

    /// Computes the end of a step with `backend`. Collective.
    fn update_with<B: StepBackend>(
        &self,
        backend: &B,
        settings: StepSettings,
    ) -> Result<(B::Decision, B::Sums), ShardError> {
        let mut loss = backend.loss(&mut lock(&self.loss))?;
        // A single rank skips the all-reduce, because ranks that are threads wait for the GPU in each collective.
        if loss.is_on_host() || self.context.world.world_size() > 1 {
            loss = self.all_reduce(&self.context.world, Label::new("loss", Phase::Loss), loss)?;
        }
        let (squares, sums) = self.squares(backend)?;
        let decision = backend.decide(&self.optimizer, &loss, &squares, settings)?;
        if B::leaves_out(&decision) {
            return Ok((decision, sums));
        }
        for (position, group) in self.groups.iter().enumerate() {
            let update = self.group_update(position);
            if update.rule.is_whole() {
                continue;
            }
            let mut state = group.state();
            let Some(gradient) = state.take_reduced() else { continue };
            let shard = state.shard_mut(update.rule.slots(), &group.layout.name)?;
            let is_written = backend.update(update, shard, &gradient, &decision)?;
            // The upload overlaps with the update of the next group.
            group.refresh_compute_shard(&mut state, is_written)?;
        }
        self.update_whole(backend, &decision)?;
        Ok((decision, sums))
    }

    /// Returns the sums of squares of the gradient by chunk, over all ranks. Each rank sums the chunks that
    /// it holds; chunks are the same under every strategy and are added in order, so the norm has the same
    /// bits under every strategy. Collective: one all-reduce over the shard axis, none over the replicas,
    /// which hold the same gradient.
    fn squares<B: StepBackend>(&self, backend: &B) -> Result<(Buffer, B::Sums), ShardError> {
        let states: Vec<_> = self.groups.iter().map(|group| group.state()).collect();
        let gradients: Vec<_> = states
            .iter()
            .enumerate()
            .filter_map(|(position, state)| Some((position, state.reduced()?)))
            .collect();
        let (squares, sums) = backend.squares(&gradients)?;
        drop(states);
        // Chunks of other ranks are zero here, so the all-reduce adds nothing to any chunk.
        match &self.context.shard {
            Some(group) => {
                let label = Label::new("grad_norm", Phase::Optimizer);
                Ok((self.all_reduce(group, label, squares)?, sums))
            }
            None => Ok((squares, sums)),
        }
    }

    fn all_reduce(
        &self,
        group: &Arc<dyn Communicator>,
        label: Label,
        values: Buffer,
    ) -> Result<Buffer, ShardError> {
        match self.context.wait(group.all_reduce(label, values)) {
            Some(sum) => Ok(sum),
            None => Err(self.context.failure()),
        }
    }

    fn host_step(&self) -> HostStep<'_> {
        HostStep { layout: &self.layout, rank: self.context.rank, updates: &self.updates }
    }

    /// Returns the 2-norm of the reduced gradient of all trainable parameters. Collective.
    pub fn grad_norm(&self) -> Result<f64, ShardError> {
        let scale = self.gradient_scale()?;
        let (squares, ()) = self.squares(&self.host_step())?;
        self.context.check()?;
        Ok(norm(&squares)? / scale)
    }

    /// Returns the first trainable parameter, in layout order, whose reduced gradient contains a value that
    /// is not finite on any rank. Collective.
    pub fn first_non_finite_gradient(&self) -> Result<Option<String>, ShardError> {
        let mut flags = Vec::new();
        for group in self.groups.iter().filter(|group| group.layout.trainable) {
            let state = group.state();
            let shard = self.shard_of(group);
            let gradient = state.reduced().map(on_host).transpose()?;
            for parameter in &group.layout.parameters {
                let (held, _) = parameter.held_by(&shard);
                flags.push(match &gradient {
                    Some(gradient) => {
                        gradient.as_slice::<f32>()?[held].iter().any(|value| !value.is_finite())
                    }
                    None => false,
                });
            }
        }
        self.first_flagged(&flags)
    }

    /// Returns the first of the trainable parameters, in layout order, whose flag is set on any rank.
    /// Collective.
    fn first_flagged(&self, flags: &[bool]) -> Result<Option<String>, ShardError> {
        let flags: Vec<_> = flags.iter().map(|flag| f64::from(u8::from(*flag))).collect();
        let flags = self.sum_over_ranks("non_finite", &flags)?;
        let names = self.layout.groups.iter().filter(|group| group.trainable);
        let mut names = names.flat_map(|group| &group.parameters);
        Ok(flags
            .iter()
            .position(|flag| *flag > 0.0)
            .and_then(|index| names.nth(index))
            .map(|parameter| parameter.name.clone()))
    }

    /// Waits for the outcome of an update and returns it. Collective: all ranks must call this for their updates in
    /// the same order, and in the same order relative to other collectives.
    pub fn outcome(&self, update: Update) -> Result<Outcome, ShardError> {
        match update.0 {
            State::Known(outcome) => Ok(outcome),
            #[cfg(feature = "cube")]
            State::OnDevice { readback, sums } => self.read(readback, &sums),
        }
    }

    /// Returns the scale of the loss, from which backward starts instead of 1; `None` if the loss is not scaled.
    pub(super) fn loss_scale(&self) -> Option<DeviceScalar> {
        #[cfg(feature = "cube")]
        return self.device_step()?.scale();
        #[cfg(not(feature = "cube"))]
        None
    }
}

#[cfg(feature = "cube")]
impl Engine {
    /// Returns the optimizer step on the GPU, or `None` if the host updates.
    fn device_step(&self) -> Option<&DeviceStep> {
        // Offloaded weights and optimizer state are updated on the host.
        let Placement::Device(client) = self.context.state_placement() else { return None };
        Some(self.device_step.get_or_init(|| {
            let scale = self.is_scaled().then(|| lock(&self.first_scale).unwrap_or_default());
            let updates = self.updates.load(Ordering::Relaxed);
            DeviceStep::new(client, &self.layout, &self.rules, self.context.rank, updates, scale)
        }))
    }

    fn is_scaled(&self) -> bool {
        self.context.policy.compute_dtype == kiln_collectives::DType::F16
    }

    fn read(&self, readback: Readback, sums: &Sums) -> Result<Outcome, ShardError> {
        let decision = DecisionValues::wait(readback)?;
        let mut non_finite = None;
        if !decision.applied && !decision.overflowed {
            let mut flags = Vec::new();
            for (position, group) in self.layout.groups.iter().enumerate() {
                let parameters = group.parameters.len();
                if let Some(step) = self.device_step().filter(|_| group.trainable) {
                    flags.extend(step.non_finite(position, sums, parameters)?);
                }
            }
            non_finite = self.first_flagged(&flags)?;
        }
        Ok(Outcome {
            loss: f64::from(decision.loss),
            grad_norm: f64::from(decision.norm),
            applied: decision.applied,
            overflowed: decision.overflowed,
            non_finite,
            loss_scale: self.is_scaled().then_some(decision.scale),
        })
    }
}
