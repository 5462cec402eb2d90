//! One unit: a flat buffer of parameters, of which this rank holds a shard.
//!
//! `unshard` starts the gather, `wait_for_unshard` hands out the weights, `reshard` frees them,
//! `accumulate` takes gradients, `post_backward` sends them off to be reduced. The verbs are
//! FSDP2's. What backward does where is decided by the boundaries that it passes
//! (`boundary.rs`), never by which parameters a batch has reached.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

use burn::backend::tensor::FloatTensor;
use kiln_collectives::{Buffer, DType, Label, Phase, Work};

use crate::error::ShardError;
#[cfg(feature = "cube")]
use crate::flat::Reading;
use crate::flat::{self, FlatTensors, FlatWeights, Placement};
use crate::layout::UnitLayout;
use crate::memory::Held;
use crate::runtime::{Counted, Runtime, lock};

/// A flat buffer of parameters on one rank.
pub(crate) struct Unit {
    pub(crate) layout: UnitLayout,
    /// Place in the forward order.
    pub(crate) position: usize,
    /// Places of all units of its part, which are needed and done at the same time.
    pub(crate) part: Range<usize>,
    /// Whether the weights stay gathered from forward to backward by default.
    keep: bool,
    /// Whether backward reads the weights' values.
    weights_in_backward: bool,
    label: Arc<str>,
    pub(crate) runtime: Arc<Runtime>,
    state: Mutex<UnitState>,
}

/// The units of one part.
pub(crate) type Units = Vec<Arc<Unit>>;

/// What of a unit is in memory.
pub(crate) struct UnitState {
    /// f32 weights of this rank's shard; lives as long as the unit. Shared only while a gather or a
    /// snapshot reads it or while it serves as the weights itself.
    pub(crate) master: Arc<Buffer>,
    /// This rank's shard in the compute dtype, where the master is offloaded; lives from the first gather
    /// after a change of the master to the next change.
    pub(crate) working: Option<Arc<Buffer>>,
    residency: Residency,
    /// Uses in forward whose backward has not finished.
    open_uses: usize,
    /// f32 gradient of the whole unit; lives from the first gradient to the reduction.
    gradient: Option<Buffer>,
    /// Which parameters have a gradient in `gradient`.
    written: Vec<bool>,
    /// f32 gradient of this rank's shard; lives from the reduction to the optimizer step.
    pub(crate) reduced: Option<Buffer>,
    /// The same on its way to the host, until the end of backward.
    #[cfg(feature = "cube")]
    arriving: Option<Reading>,
    /// Whether the reduction of this step has been launched.
    launched: bool,
    /// f32 first and second moment of this rank's shard; live from the first optimizer step on.
    pub(crate) moments: Option<Moments>,
    /// Alive as long as a snapshot reads weights and moments.
    pub(crate) snapshot: Weak<()>,
}

/// Moments of AdamW for one shard, f32. Shared only while a snapshot reads them.
pub(crate) struct Moments {
    pub(crate) first: Arc<Buffer>,
    pub(crate) second: Arc<Buffer>,
}

impl Moments {
    /// Zeros for a shard as long as `shard`, in the same place.
    pub(crate) fn like(shard: &Buffer) -> Self {
        let placement = Placement::of_buffer(shard);
        let zeros = || Arc::new(placement.zeros(DType::F32, shard.len()));
        Moments { first: zeros(), second: zeros() }
    }
}

/// Whether the whole weights are in memory.
// One per unit: the difference in size does not matter.
#[allow(clippy::large_enum_variant)]
enum Residency {
    /// Only the shard is.
    Sharded,
    /// The gather is under way.
    Unsharding { work: Work, counted: Counted },
    /// They are; the last view and this reference keep them alive.
    Unsharded(FlatWeights),
}

/// One use of a unit in a forward pass.
#[derive(Debug, Default)]
pub(crate) struct Use {
    /// Whether a gradient of this use has arrived.
    has_gradient: AtomicBool,
}

impl std::fmt::Debug for Unit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Unit({})", self.layout.name)
    }
}

impl Unit {
    pub(crate) fn new(
        layout: UnitLayout,
        position: usize,
        part: Range<usize>,
        keep: bool,
        weights_in_backward: bool,
        master: Buffer,
        runtime: Arc<Runtime>,
    ) -> Self {
        let state = UnitState {
            master: Arc::new(master),
            working: None,
            residency: Residency::Sharded,
            open_uses: 0,
            gradient: None,
            written: vec![false; layout.parameters.len()],
            reduced: None,
            #[cfg(feature = "cube")]
            arriving: None,
            launched: false,
            moments: None,
            snapshot: Weak::new(),
        };
        Unit {
            label: layout.name.as_str().into(),
            layout,
            position,
            part,
            keep,
            weights_in_backward,
            runtime,
            state: Mutex::new(state),
        }
    }

    pub(crate) fn state(&self) -> std::sync::MutexGuard<'_, UnitState> {
        lock(&self.state)
    }

    pub(crate) fn label(&self, phase: Phase) -> Label {
        Label::new(self.label.clone(), phase)
    }

    /// Starts gathering the weights unless they are here or on their way.
    pub(crate) fn unshard(&self, phase: Phase) {
        let mut state = self.state();
        if matches!(state.residency, Residency::Sharded) && !self.runtime.failed() {
            match self.start_unshard(&mut state, phase) {
                Ok(residency) => state.residency = residency,
                Err(error) => self.runtime.fail(error),
            }
        }
    }

    fn start_unshard(&self, state: &mut UnitState, phase: Phase) -> Result<Residency, ShardError> {
        let dtype = self.runtime.policy.compute_dtype;
        let runtime = &self.runtime;
        let working = if runtime.offloads() { Some(self.working(state)?) } else { None };
        let master = &state.master;
        let Some(group) = &runtime.shard else {
            let weights = if let Some(working) = working {
                FlatWeights::master(working)
            } else if dtype == DType::F32 {
                FlatWeights::master(master.clone())
            } else {
                let mut whole = runtime.pool.take(runtime.placement(), dtype, master.len());
                flat::cast_from_f32(master, &mut whole)?;
                self.gathered(whole, self.counted(None))
            };
            return Ok(Residency::Unsharded(weights));
        };
        let shard = match working {
            Some(working) => working,
            None if dtype == DType::F32 => master.clone(),
            None => Arc::new(flat::cast_to(master, dtype)?),
        };
        let numel = self.layout.padded_numel();
        let (whole, held) = if group.shares_gathers() && shard.is_on_host() {
            (Buffer::unallocated(dtype, numel), Some(Held::new(numel * dtype.size())))
        } else {
            (runtime.pool.take(runtime.placement(), dtype, numel), None)
        };
        let counted = self.counted(held);
        let work = group.all_gather(self.label(phase), shard, whole);
        Ok(Residency::Unsharding { work, counted })
    }

    /// The shard in the compute dtype where it computes, while the master is elsewhere.
    fn working(&self, state: &mut UnitState) -> Result<Arc<Buffer>, ShardError> {
        if let Some(working) = &state.working {
            return Ok(working.clone());
        }
        let (master, dtype) = (&*state.master, self.runtime.policy.compute_dtype);
        let cast = if dtype == DType::F32 { None } else { Some(flat::cast_to(master, dtype)?) };
        let working = Arc::new(self.runtime.placement().copy(cast.as_ref().unwrap_or(master)));
        state.working = Some(working.clone());
        Ok(working)
    }

    /// Sends an updated master to where it computes, if that is elsewhere.
    pub(crate) fn refresh(&self, state: &mut UnitState) -> Result<(), ShardError> {
        if self.runtime.offloads() {
            state.working = None;
            self.working(state)?;
        }
        Ok(())
    }

    /// Keeps the reduced gradient for the optimizer step, which comes after [`Unit::settle_reduced`].
    pub(crate) fn keep_reduced(&self, shard: Buffer) -> Result<(), ShardError> {
        let shard = flat::into_f32(shard)?;
        let mut state = self.state();
        #[cfg(feature = "cube")]
        if self.runtime.offloads() {
            state.arriving = Some(Reading::of(&shard)?);
            return Ok(());
        }
        state.reduced = Some(shard);
        Ok(())
    }

    /// Waits until the reduced gradient is where the optimizer needs it.
    pub(crate) fn settle_reduced(&self) -> Result<(), ShardError> {
        #[cfg(feature = "cube")]
        {
            let mut state = self.state();
            if let Some(reading) = state.arriving.take() {
                state.reduced = Some(reading.wait()?);
            }
        }
        Ok(())
    }

    fn counted(&self, held: Option<Held>) -> Counted {
        let unit = (!self.keep).then(|| self.runtime.live.enter());
        Counted { _unit: unit, _held: held }
    }

    /// The whole weights, gathering them if need be. In forward, then starts gathering the unit that
    /// is needed next, so that it arrives while this one is computed with; in backward, the boundary
    /// at the part's output has done that.
    pub(crate) fn wait_for_unshard(&self, phase: Phase) -> FlatWeights {
        self.runtime.keep_awake();
        self.unshard(phase);
        let weights = self.arrived();
        if phase == Phase::Forward {
            self.prefetch(phase);
        }
        weights
    }

    fn arrived(&self) -> FlatWeights {
        let mut state = self.state();
        let weights = match std::mem::replace(&mut state.residency, Residency::Sharded) {
            Residency::Unsharded(weights) => weights,
            Residency::Unsharding { work, counted } => {
                let buffer = self.runtime.wait(work).unwrap_or_else(|| self.zeros());
                self.gathered(buffer, counted)
            }
            // Only after a failure: the pass goes on with zeros until it is checked.
            Residency::Sharded => self.gathered(self.zeros(), Counted::default()),
        };
        state.residency = Residency::Unsharded(weights.clone());
        weights
    }

    fn gathered(&self, whole: Buffer, counted: Counted) -> FlatWeights {
        FlatWeights::gathered(whole, &self.runtime, self.reshards_after_forward(), counted)
    }

    fn zeros(&self) -> Buffer {
        let placement = self.runtime.placement();
        placement.zeros(self.runtime.policy.compute_dtype, self.layout.padded_numel())
    }

    /// Gathers the weights for backward, unless they are here or it does not read them.
    pub(crate) fn unshard_in_backward(&self) {
        if self.weights_in_backward {
            self.unshard(Phase::Backward);
        }
    }

    /// Starts gathering what the pass needs after this unit's part.
    pub(crate) fn prefetch(&self, phase: Phase) {
        let runtime = &self.runtime;
        let next = match phase {
            Phase::Backward => (0..self.part.start)
                .rev()
                .filter_map(|position| runtime.unit(position))
                .find(|unit| unit.weights_in_backward),
            // Parts are used in order; one that comes a second time (a tied embedding under the
            // head) has had its successor.
            _ => {
                let reached = runtime.forward_position.fetch_max(self.position, Ordering::Relaxed);
                if self.position < reached { None } else { runtime.unit(self.part.end) }
            }
        };
        match next {
            Some(next) => {
                for unit in next.part.clone().filter_map(|position| runtime.unit(position)) {
                    unit.unshard(phase);
                }
            }
            None if phase == Phase::Backward => runtime.pool.close(),
            None => {}
        }
    }

    /// Parameter `slot` as a tensor, gathering the unit if need be.
    pub(crate) fn parameter<B: FlatTensors>(
        &self,
        token: &FloatTensor<B>,
        slot: usize,
        phase: Phase,
    ) -> FloatTensor<B> {
        let weights = self.wait_for_unshard(phase);
        let parameter = &self.layout.parameters[slot];
        let dtype = self.runtime.policy.compute_dtype;
        B::view(&weights, token, &parameter.shape, parameter.offset, dtype)
    }

    /// Frees the whole weights. A gather under way is waited for: the other ranks take part in it.
    pub(crate) fn reshard(&self) {
        let residency = std::mem::replace(&mut self.state().residency, Residency::Sharded);
        match residency {
            Residency::Sharded => {}
            Residency::Unsharding { work, .. } => {
                if let Some(buffer) = self.runtime.wait(work) {
                    self.runtime.pool.put(buffer);
                }
            }
            Residency::Unsharded(weights) => {
                let is_f32 = self.runtime.policy.compute_dtype == DType::F32;
                let stays = self.runtime.shard.is_none() && (is_f32 || self.runtime.offloads());
                if weights.has_views() && !stays {
                    self.runtime.report_pinned(&self.layout.name);
                }
            }
        }
    }

    /// Frees the whole weights after forward. Frozen ones stay where they may be on burn's `tape` until
    /// backward: it can gather a tracked tensor again, but not a constant. Whether the batch has used
    /// them makes no difference: every rank must free the same weights.
    pub(crate) fn reshard_after_forward(&self, tape: bool) {
        let stays = tape && self.weights_in_backward && !self.layout.trainable;
        if self.reshards_after_forward() && !stays {
            self.reshard();
        }
    }

    /// Whether the weights are freed between forward and backward.
    pub(crate) fn reshards_after_forward(&self) -> bool {
        self.runtime.policy.reshards_after_forward(self.keep)
    }

    /// Announces a use whose backward will come.
    pub(crate) fn open_use(&self) {
        self.state().open_uses += 1;
    }

    /// Takes the gradient of parameter `slot` from one use.
    pub(crate) fn accumulate<B: FlatTensors>(
        &self,
        slot: usize,
        from: &Use,
        gradient: FloatTensor<B>,
    ) {
        if self.runtime.failed() {
            return;
        }
        if !from.has_gradient.swap(true, Ordering::Relaxed) {
            self.before_first_gradient();
        }
        if let Err(reason) = self.add::<B>(slot, gradient) {
            let name = self.layout.parameters[slot].name.clone();
            self.runtime.fail(ShardError::Gradient { name, reason });
        }
    }

    /// Gathers stand below everything that reads them on the tape, so the first gradient of a use
    /// means that nothing of this use will read the weights again: they make room for the gradient.
    fn before_first_gradient(&self) {
        self.reshard_after_use();
        let mut state = self.state();
        if state.gradient.is_none() && !state.launched {
            drop(state);
            let buffer =
                self.runtime.reducer.take_buffer(&self.runtime, self.layout.padded_numel());
            state = self.state();
            state.gradient = Some(buffer);
            state.written.fill(false);
        }
    }

    /// Frees the weights when backward has read them for the last time in this use, unless another
    /// use or micro-batch will read them again.
    fn reshard_after_use(&self) {
        let last_use = self.state().open_uses <= 1;
        let done = last_use || !self.weights_in_backward;
        if self.reshards_after_forward() || (done && self.runtime.is_last_micro_batch()) {
            self.reshard();
        }
    }

    /// Backward is done with one use. With the last one of the last micro-batch, the gradient is
    /// reduced.
    pub(crate) fn leave_backward(self: &Arc<Self>) {
        if self.runtime.failed() {
            return;
        }
        self.reshard_after_use();
        let mut state = self.state();
        state.open_uses = state.open_uses.saturating_sub(1);
        let complete = state.open_uses == 0;
        drop(state);
        if complete && self.runtime.is_last_micro_batch() {
            self.post_backward();
        }
    }

    fn add<B: FlatTensors>(&self, slot: usize, gradient: FloatTensor<B>) -> Result<(), String> {
        let mut state = self.state();
        let UnitState { gradient: target, written, .. } = &mut *state;
        let target = target.as_mut().ok_or("arrived after its unit was reduced")?;
        let range = self.layout.parameters[slot].range();
        B::add_gradient(target, range, gradient, !written[slot])?;
        written[slot] = true;
        Ok(())
    }

    /// Sends the gradient off to be reduced, once per step. Parameters without a gradient count as
    /// zero: every rank must take part in the same reductions.
    pub(crate) fn post_backward(self: &Arc<Self>) {
        if !self.layout.trainable {
            return;
        }
        let mut state = self.state();
        if std::mem::replace(&mut state.launched, true) {
            return;
        }
        state.open_uses = 0;
        let gradient = state.gradient.take();
        let written =
            std::mem::replace(&mut state.written, vec![false; self.layout.parameters.len()]);
        drop(state);
        let result = match gradient {
            Some(mut gradient) => self.clear_unwritten(&mut gradient, &written).map(|()| gradient),
            None => Ok(self.runtime.placement().zeros(DType::F32, self.layout.padded_numel())),
        };
        match result.and_then(|gradient| self.runtime.reducer.launch(&self.runtime, self, gradient))
        {
            Ok(()) => {}
            Err(error) => self.runtime.fail(error),
        }
    }

    fn clear_unwritten(&self, gradient: &mut Buffer, written: &[bool]) -> Result<(), ShardError> {
        let unwritten =
            self.layout.parameters.iter().zip(written).filter(|(_, written)| !**written);
        let unwritten = unwritten.map(|(parameter, _)| parameter.range());
        Ok(flat::clear(gradient, self.layout.gaps().into_iter().chain(unwritten))?)
    }

    /// Ready for the next step: nothing is open, and no gradient is left of the last one.
    pub(crate) fn begin_step(&self) {
        let mut state = self.state();
        state.launched = false;
        state.open_uses = 0;
        state.gradient = None;
        state.reduced = None;
        #[cfg(feature = "cube")]
        {
            state.arriving = None;
        }
    }
}
