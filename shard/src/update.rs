//! The end of a step: the loss over all ranks, the norm of the gradient, clipping, and AdamW, which is
//! left out if one of the first two is not finite.
//!
//! On the host, and where state is offloaded to it, all of it is done when [`Engine::update`] returns. A GPU decides for itself and is not
//! waited for; [`Engine::outcome`] is for later, when it has long been done.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use kiln_collectives::BufferError;
#[cfg(feature = "cube")]
use kiln_collectives::{Buffer, Label, Phase};
use serde::{Deserialize, Serialize};

use crate::engine::Engine;
use crate::error::ShardError;
#[cfg(feature = "cube")]
use crate::flat::{Decision, DeviceStep, Reading, Settings, Sums};
use crate::memory;
use crate::optimizer::{AdamW, clip_factor};
use crate::runtime::lock;

/// What a step came to; the same on all ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Sum of the losses that [`Engine::backward`] was given, over all ranks.
    pub loss: f64,
    /// 2-norm of the gradient before clipping; the value that clipping used.
    pub grad_norm: f64,
    /// Whether weights and moments were updated: loss and norm are finite.
    pub applied: bool,
    /// Whether they were not because the scale of the loss was too large, see [`LossScale`]. It is
    /// smaller now, and nothing is wrong.
    pub overflowed: bool,
    /// The first trainable parameter, in layout order, whose gradient is not finite, if there is one
    /// and the update was left out for it.
    pub non_finite: Option<String>,
    /// The scale of the loss from now on.
    pub loss_scale: Option<LossScale>,
}

/// What the loss is multiplied by before backward, so that small gradients are not lost in `f16`
/// (Micikevicius et al., 2018): halved when a gradient overflows, which leaves the update out, and
/// doubled after 2000 updates without that.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossScale {
    /// The factor.
    pub scale: f64,
    /// Updates since it was changed.
    pub steps: u64,
}

#[cfg(feature = "cube")]
impl LossScale {
    /// No scaling.
    pub(crate) const NONE: LossScale = LossScale { scale: 1.0, steps: 0 };
}

impl Default for LossScale {
    /// Where a run starts.
    fn default() -> Self {
        LossScale { scale: 65_536.0, steps: 0 }
    }
}

/// An update that has been issued, and whose outcome may not be known yet.
#[must_use]
pub struct Update(State);

enum State {
    Known(Outcome),
    #[cfg(feature = "cube")]
    OnDevice {
        reading: Reading,
        sums: Sums,
        scaled: bool,
    },
}

/// What an engine keeps from step to step besides weights and moments.
#[derive(Default)]
pub(crate) struct Progress {
    /// Updates that have been made; on a GPU as of the start, it counts on by itself.
    updates: AtomicU64,
    /// Scale of the loss to start with.
    scale: Mutex<Option<LossScale>>,
    /// Loss of the step so far, on this rank.
    pub(crate) loss: Mutex<LossSum>,
    #[cfg(feature = "cube")]
    pub(crate) device: Mutex<Option<std::sync::Arc<DeviceStep>>>,
}

/// A sum of losses, where they are.
#[derive(Default)]
pub(crate) struct LossSum {
    pub(crate) host: f64,
    #[cfg(feature = "cube")]
    pub(crate) device: Option<Buffer>,
}

impl LossSum {
    /// The sum. Waits for the device that it is on.
    fn read(&self) -> Result<f64, BufferError> {
        #[cfg(feature = "cube")]
        if let Some(sum) = &self.device {
            return Ok(self.host + f64::from(sum.to_host()?.as_slice::<f32>()?[0]));
        }
        Ok(self.host)
    }
}

impl Engine {
    /// Says that `updates` have been made, and which scale the loss had: when a run goes on. To be
    /// called before the first step.
    pub fn resume(&self, updates: u64, scale: Option<LossScale>) {
        let progress = &self.runtime().progress;
        progress.updates.store(updates, Ordering::Relaxed);
        *lock(&progress.scale) = scale;
    }

    /// Clips the gradient to the norm `max_norm` (0 for no clipping) and updates this rank's shards in
    /// place, unless loss or norm are not finite. Collective.
    pub fn update(
        &self,
        adamw: &AdamW,
        learning_rate: f64,
        max_norm: f64,
    ) -> Result<Update, ShardError> {
        self.runtime().check()?;
        #[cfg(feature = "cube")]
        if let Some(step) = self.device_step() {
            return self
                .update_on_device(&step, Settings { adamw: *adamw, learning_rate, max_norm });
        }
        self.runtime().keep_awake();
        let progress = &self.runtime().progress;
        let loss = lock(&progress.loss).read()?;
        let loss = self.sum_over_ranks("loss", &[loss])?[0];
        let grad_norm = self.grad_norm()?;
        let applied = loss.is_finite() && grad_norm.is_finite();
        let mut non_finite = None;
        if applied {
            let step = progress.updates.fetch_add(1, Ordering::Relaxed) + 1;
            self.step(adamw, step, learning_rate, clip_factor(grad_norm, max_norm))?;
        } else {
            non_finite = self.first_non_finite_gradient()?;
        }
        memory::use_huge_pages();
        let (overflowed, loss_scale) = (false, None);
        let outcome = Outcome { loss, grad_norm, applied, overflowed, non_finite, loss_scale };
        Ok(Update(State::Known(outcome)))
    }

    /// What an update came to; waits until it is known. Collective: all ranks ask, in the order of the
    /// updates, at the same place between their other calls.
    pub fn outcome(&self, update: Update) -> Result<Outcome, ShardError> {
        match update.0 {
            State::Known(outcome) => Ok(outcome),
            #[cfg(feature = "cube")]
            State::OnDevice { reading, sums, scaled } => self.read(reading, &sums, scaled),
        }
    }

    /// The names of parameters whose `flags` (in layout order, trainable ones only) are set on any
    /// rank: the first of them. Collective.
    pub(crate) fn first_flagged(&self, flags: &[f64]) -> Result<Option<String>, ShardError> {
        let flags = self.sum_over_ranks("non_finite", flags)?;
        let names = self.layout().units.iter().filter(|unit| unit.trainable);
        let mut names = names.flat_map(|unit| &unit.parameters);
        Ok(flags
            .iter()
            .position(|flag| *flag > 0.0)
            .and_then(|index| names.nth(index))
            .map(|parameter| parameter.name.clone()))
    }
}

#[cfg(feature = "cube")]
impl Engine {
    /// The tables and the state of steps on a GPU, made at the first one's start; `None` on the host.
    pub(crate) fn device_step(&self) -> Option<std::sync::Arc<DeviceStep>> {
        use crate::flat::Placement;
        use kiln_collectives::DType;
        let runtime = self.runtime();
        // Offloaded weights and moments are updated on the host.
        let Placement::Device(client) = runtime.state_placement() else { return None };
        let progress = &runtime.progress;
        let mut device = lock(&progress.device);
        let step = device.get_or_insert_with(|| {
            let scaled = runtime.policy.compute_dtype == DType::F16;
            let scale = scaled.then(|| lock(&progress.scale).unwrap_or_default());
            let units = self.units().iter().map(|unit| &unit.layout);
            let updates = progress.updates.load(Ordering::Relaxed);
            let (mesh, rank) = (&runtime.mesh, runtime.rank);
            DeviceStep::new(client, units, mesh, rank, updates, scale).into()
        });
        Some(step.clone())
    }

    fn update_on_device(
        &self,
        step: &DeviceStep,
        settings: Settings,
    ) -> Result<Update, ShardError> {
        use crate::snapshot;
        use crate::unit::{Moments, UnitState};
        use kiln_collectives::DType;
        let runtime = self.runtime();
        let loss = lock(&runtime.progress.loss).device.take();
        let mut loss = loss.unwrap_or_else(|| runtime.placement().zeros(DType::F32, 1));
        if runtime.mesh.world_size() > 1 {
            let work = runtime.world.all_reduce(Label::new("loss", Phase::Loss), loss);
            let Some(sum) = runtime.wait(work) else { return Err(self.failure()) };
            loss = sum;
        }
        let states: Vec<_> = self.units().iter().map(|unit| unit.state()).collect();
        let gradients = states.iter().enumerate().filter_map(|(position, state)| {
            state.reduced.as_ref().map(|gradient| (position, gradient))
        });
        let (mut pieces, sums) = step.squares(gradients)?;
        drop(states);
        if let Some(group) = &runtime.shard {
            let work = group.all_reduce(Label::new("grad_norm", Phase::Optimizer), pieces);
            let Some(sum) = runtime.wait(work) else { return Err(self.failure()) };
            pieces = sum;
        }
        let decision = step.decide(&pieces, &loss, &settings)?;
        for unit in self.units() {
            let mut state = unit.state();
            let Some(gradient) = state.reduced.take() else { continue };
            let UnitState { master, moments, snapshot, .. } = &mut *state;
            let moments = moments.get_or_insert_with(|| Moments::like(&gradient));
            let own = |buffer| snapshot::own(buffer, snapshot, &unit.layout);
            let shards = [own(master)?, own(&mut moments.first)?, own(&mut moments.second)?];
            step.update(unit.position, shards, &gradient, &decision, &settings)?;
        }
        let scaled = runtime.policy.compute_dtype == DType::F16;
        Ok(Update(State::OnDevice { reading: step.read(decision), sums, scaled }))
    }

    /// The first failure. Called where there is one.
    fn failure(&self) -> ShardError {
        match self.runtime().check() {
            Err(error) => error,
            Ok(()) => unreachable!("invariant: what was waited for in vain has left an error"),
        }
    }

    fn read(&self, reading: Reading, sums: &Sums, scaled: bool) -> Result<Outcome, ShardError> {
        let decision = Decision::wait(reading)?;
        let mut non_finite = None;
        if !decision.applied && !decision.overflowed {
            let device = lock(&self.runtime().progress.device).clone();
            let mut flags = Vec::new();
            for unit in self.units().iter().filter(|unit| unit.layout.trainable) {
                let parameters = unit.layout.parameters.len();
                let own = sums.iter().find(|(position, _)| *position == unit.position);
                let found = match (&device, own) {
                    (Some(step), Some((_, sums))) => {
                        step.non_finite(unit.position, sums, parameters)?
                    }
                    _ => vec![false; parameters],
                };
                flags.extend(found.into_iter().map(|bad| f64::from(u8::from(bad))));
            }
            non_finite = self.first_flagged(&flags)?;
        }
        Ok(Outcome {
            loss: f64::from(decision.loss),
            grad_norm: f64::from(decision.norm),
            applied: decision.applied,
            overflowed: decision.overflowed,
            non_finite,
            loss_scale: scaled.then_some(decision.scale),
        })
    }
}
