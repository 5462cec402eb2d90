//! Observers of a run's steps, which see the tensors of modules, the gradient, and the outcome of a step.

use std::fmt;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use clap::ValueEnum;
use kiln_config::device::ResolvedDevice;
use kiln_model::ops::{Probe, Seen};
use kiln_shard::Engine;
use serde::{Deserialize, Serialize};

use crate::error::{Result, TrainError};
use crate::metrics::StepMetrics;
use crate::passes::MicroBatch;

/// The part of a step in which a tensor is seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub enum Pass {
    /// The forward pass.
    Forward,
    /// The repeated forward pass of a block that the policy recomputes during the backward pass.
    Recompute,
    /// The backward pass, in which gradients are seen.
    Backward,
}

/// A moment within a step on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    /// The optimizer step, from 1.
    pub step: u64,
    /// The micro-batch of the rank, from 0.
    pub micro_batch: usize,
    /// Position in the global order of the micro-batch's first sample.
    pub first_sample: u64,
    /// The current pass.
    pub pass: Pass,
}

/// Observes the steps of one rank. Every rank calls the same observers at the same places in the same order,
/// so an observer may communicate if it does so on all ranks.
pub trait Observer: Send {
    /// Returns whether to call this observer for the step.
    fn is_observing(&self, step: u64) -> bool;

    /// Returns whether the observer sees this rank's passes of the step. If ranks differ, it must not communicate.
    fn is_observing_passes(&self, step: u64) -> bool {
        self.is_observing(step)
    }

    /// Returns whether this observer has received a request while the run continued.
    fn has_request(&self) -> bool {
        false
    }

    /// Serves the requests of any rank's observer after step `step`, on all ranks. Errors end the run.
    fn serve_requests(&mut self, _engine: &Engine, _step: u64) -> Result<()> {
        Ok(())
    }

    /// Called on all ranks when a step begins, even if this observer does not observe it. Must not communicate.
    fn on_step_begin(&mut self, _engine: &Engine, _step: u64) {}

    /// Called before the outcome of a step is known, under the conditions of [`Observer::on_step_begin`].
    fn on_step_end(&mut self, _engine: &Engine, _step: u64) {}

    /// Called when a micro-batch is ready, before its forward pass. Errors end the run.
    fn on_batch(&mut self, _engine: &Engine, _at: Moment, _batch: &MicroBatch) -> Result<()> {
        Ok(())
    }

    /// Called for each tensor of a pass, and for its gradient. Errors end the run once the pass is over.
    fn on_tensor(&mut self, _engine: &Engine, _at: Moment, _seen: &Seen<'_>) -> Result<()> {
        Ok(())
    }

    /// Called when the gradient of the step has been reduced, before the update. Errors end the run.
    fn on_gradients(&mut self, _engine: &Engine, _step: u64) -> Result<()> {
        Ok(())
    }

    /// Called when the step is over and its outcome is known. Errors end the run.
    fn on_step_done(&mut self, _engine: &Engine, _metrics: &StepMetrics) -> Result<()> {
        Ok(())
    }

    /// Returns a closing remark, which rank 0 prints at the end of the run.
    fn closing(&self) -> Option<String> {
        None
    }
}

/// Tools that inspect runs from outside the trainer; see [`RunOptions::tools`](super::RunOptions::tools).
pub trait Tools: fmt::Debug + Send + Sync {
    /// Checks that a run of `ranks` ranks and `steps` steps supports these tools, or describes the problem.
    fn check(
        &self,
        ranks: usize,
        steps: u64,
        with_mpi: bool,
        on_gpu: bool,
    ) -> std::result::Result<(), String>;

    /// Attaches the tools to a process of a run, until the result is dropped.
    fn attach(&self, run: &RunFacts<'_>) -> Box<dyn AttachedTools>;
}

/// The tools of one process of a run.
pub trait AttachedTools: Send + Sync {
    /// Returns the observers of a rank of this process, in the order in which they are called.
    fn observers(&self, rank: ObservedRank) -> Vec<Box<dyn Observer>>;
}

/// Facts about a run and the ranks of this process.
#[derive(Clone, Copy, Debug)]
pub struct RunFacts<'a> {
    /// The run folder.
    pub out: &'a Path,
    /// The ranks of this process.
    pub ranks: &'a [usize],
    /// Number of ranks in total.
    pub world_size: usize,
    /// Number of optimizer steps of the run.
    pub steps: u64,
    /// Longest time a rank may wait for the others in one collective.
    pub deadline: Duration,
    /// True if the ranks compute on GPUs.
    pub on_gpu: bool,
    /// Address at which browsers can watch the run: `log.http`.
    pub http: Option<SocketAddr>,
}

/// Facts about a rank that its observers need.
#[derive(Debug)]
pub struct ObservedRank {
    /// The rank.
    pub rank: usize,
    /// The device on which the rank computes.
    pub device: ResolvedDevice,
    /// Applies changes to the run that its observers request.
    pub controls: Controls,
    /// Set to request that the run stop.
    pub stop: Arc<AtomicBool>,
    /// The content of the tokenizer file of the data.
    pub tokenizer: Arc<[u8]>,
    /// Tokens per sample.
    pub seq_len: usize,
    /// Samples per micro-batch.
    pub rows: usize,
    /// The run folder.
    pub out: PathBuf,
    /// The steps and places at which breakpoints can hold the run.
    pub reach: Reach,
}

/// The steps and places of a run at which breakpoints can hold it.
#[derive(Clone, Debug)]
pub struct Reach {
    /// Remaining steps of the run.
    pub steps: RangeInclusive<u64>,
    /// Number of blocks of the run's model.
    pub layers: usize,
    /// True if custom layers may show additional places and tensors.
    pub has_own_places: bool,
    /// True if blocks are recomputed during the backward pass.
    pub recomputes: bool,
}

/// Changes that observers make to a run, the same on all ranks. Clones share the changes.
#[derive(Clone, Debug, Default)]
pub struct Controls(Arc<Mutex<Changes>>);

/// The requested changes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Changes {
    /// New value of `optim.lr`.
    pub lr: Option<f64>,
    /// New value of `optim.grad_clip`.
    pub grad_clip: Option<f64>,
    save: bool,
}

impl Controls {
    fn lock(&self) -> MutexGuard<'_, Changes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the value of a key for the following steps. Returns a message for the user.
    pub fn set(&self, key: &str, value: &str) -> String {
        let Some(number) = value.parse().ok().filter(|number: &f64| number.is_finite() && *number >= 0.0)
        else {
            return format!("{key}: expected a non-negative number, found \"{value}\"");
        };
        let mut changes = self.lock();
        match key {
            "optim.lr" => changes.lr = Some(number),
            "optim.grad_clip" => changes.grad_clip = Some(number),
            _ => {
                return format!("{key} cannot be changed during a run; optim.lr and optim.grad_clip can");
            }
        }
        format!("{key} = {number} from the next update on")
    }

    /// Requests a checkpoint after this step.
    pub fn save(&self) {
        self.lock().save = true;
    }

    /// Returns the values that observers have changed so far.
    pub fn changes(&self) -> Changes {
        *self.lock()
    }

    /// Returns whether a checkpoint was requested since the last call.
    pub fn take_save(&self) -> bool {
        std::mem::take(&mut self.lock().save)
    }
}

/// The observers of one rank, in calling order. Clones share the observers.
#[derive(Clone, Default)]
pub struct Observers(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    observers: Vec<Box<dyn Observer>>,
    now: Option<Moment>,
    /// The first error of an observer during a pass, which cannot return it.
    error: Option<TrainError>,
}

impl fmt::Debug for Observers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Observers")
    }
}

impl State {
    fn shown(&mut self, step: u64) -> impl Iterator<Item = &mut Box<dyn Observer>> {
        self.observers.iter_mut().filter(move |observer| observer.is_observing_passes(step))
    }

    fn each(&mut self, step: u64, mut call: impl FnMut(&mut dyn Observer) -> Result<()>) -> Result<()> {
        let mut interested = self.observers.iter_mut().filter(|observer| observer.is_observing(step));
        interested.try_for_each(|observer| call(&mut **observer))
    }
}

impl Observers {
    pub fn new(observers: Vec<Box<dyn Observer>>) -> Self {
        Observers(Arc::new(Mutex::new(State { observers, ..State::default() })))
    }

    fn with<R>(&self, call: impl FnOnce(&mut State) -> R) -> R {
        call(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub fn is_observing(&self, step: u64) -> bool {
        self.with(|state| state.observers.iter().any(|observer| observer.is_observing(step)))
    }

    pub fn on_step_begin(&self, engine: &Engine, step: u64) {
        self.with(|state| {
            state.observers.iter_mut().for_each(|observer| observer.on_step_begin(engine, step))
        });
    }

    pub fn on_step_end(&self, engine: &Engine, step: u64) {
        self.with(|state| state.observers.iter_mut().for_each(|observer| observer.on_step_end(engine, step)));
    }

    /// Announces a micro-batch at `at`. Returns the probe for its passes if an observer observes the step.
    pub fn on_batch(&self, engine: &Arc<Engine>, at: Moment, batch: &MicroBatch) -> Result<Option<Probe>> {
        let is_shown = self.with(|state| {
            if state.shown(at.step).next().is_none() {
                return Ok::<_, TrainError>(false);
            }
            state.now = Some(at);
            state.shown(at.step).try_for_each(|observer| observer.on_batch(engine, at, batch))?;
            Ok(true)
        })?;
        if !is_shown {
            return Ok(None);
        }
        let (observers, engine) = (self.clone(), engine.clone());
        Ok(Some(Probe::new(move |seen| observers.on_tensor(&engine, &seen))))
    }

    pub fn have_request(&self) -> bool {
        self.with(|state| state.observers.iter().any(|observer| observer.has_request()))
    }

    pub fn serve_requests(&self, engine: &Engine, step: u64) -> Result<()> {
        self.with(|state| {
            state.observers.iter_mut().try_for_each(|observer| observer.serve_requests(engine, step))
        })
    }

    fn on_tensor(&self, engine: &Engine, seen: &Seen<'_>) {
        self.with(|state| {
            let Some(now) = &mut state.now else { return };
            // Backward begins with the gradient of the loss.
            now.pass = match (seen.is_gradient, now.pass) {
                (true, _) => Pass::Backward,
                (false, Pass::Forward) => Pass::Forward,
                (false, Pass::Recompute | Pass::Backward) => Pass::Recompute,
            };
            let at = *now;
            let outcome: Result<()> =
                state.shown(at.step).try_for_each(|observer| observer.on_tensor(engine, at, seen));
            if let Err(error) = outcome {
                state.error.get_or_insert(error);
            }
        });
    }

    /// Announces that the gradient of `step` is reduced. Fails with an observer's error from the passes, if any.
    pub fn on_gradients(&self, engine: &Engine, step: u64) -> Result<()> {
        self.with(|state| {
            state.error.take().map_or(Ok(()), Err)?;
            state.each(step, |observer| observer.on_gradients(engine, step))
        })
    }

    pub fn closing(&self) -> Vec<String> {
        self.with(|state| state.observers.iter().filter_map(|observer| observer.closing()).collect())
    }

    pub fn on_step_done(&self, engine: &Engine, metrics: &StepMetrics) -> Result<()> {
        self.with(|state| state.each(metrics.step, |observer| observer.on_step_done(engine, metrics)))
    }
}
