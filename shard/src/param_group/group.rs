//! The life of one parameter group: a flat buffer of parameters, of which this rank holds a shard.
//!
//! `unshard` starts the gather, `wait_for_unshard` returns the weights, `reshard` frees them, `accumulate` adds
//! gradients, and `post_backward` starts their reduction. These verbs are FSDP2's. Module boundaries
//! (`tape/boundary.rs`) determine where backward calls them, regardless of which parameters a batch has used.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};

use burn::backend::tensor::FloatTensor;
use kiln_collectives::{Buffer, DType, Label};

use super::state::{Gradient, GroupState, Weights};
use crate::buffers::{self, Counted, FlatTensors, FlatWeights, Gathered, UnshardedGroup};
use crate::comm::{CommContext, Direction, Reducer};
use crate::error::ShardError;
use crate::layout::ParamGroupLayout;
use crate::memory::{self, Held, MemoryOwner, owned_by};
use crate::sync::lock;

/// A parameter group on one rank.
pub(crate) struct ParamGroup {
    pub(crate) layout: ParamGroupLayout,
    pub(crate) options: GroupOptions,
    pub(crate) context: Arc<CommContext>,
    label: Arc<str>,
    reducer: Arc<Reducer>,
    neighbours: OnceLock<Neighbours>,
    state: Mutex<GroupState>,
}

/// The parameter groups of one module, or those that backward leaves together.
pub(crate) type ParamGroups = Vec<Arc<ParamGroup>>;

/// The role of a parameter group in its model.
#[derive(Clone, Debug)]
pub(crate) struct GroupOptions {
    /// Position in the order of the forward pass.
    pub(crate) position: usize,
    /// Positions of all groups of the same module, which are gathered and freed together.
    pub(crate) module: Range<usize>,
    /// Set if the strategy may free the weights between forward and backward.
    pub(crate) reshard_after_forward: bool,
    /// Set if backward reads the weights' values.
    pub(crate) unshard_in_backward: bool,
    /// Set if any of its parameters is initialised now, instead of being loaded later.
    pub(crate) is_initialised: bool,
}

/// The groups of the modules that forward and backward need next.
pub(crate) struct Neighbours {
    /// Needed next in forward.
    pub(crate) next: Vec<Weak<ParamGroup>>,
    /// Needed next in backward; empty if backward reads no weights of the modules before this one.
    pub(crate) previous: Vec<Weak<ParamGroup>>,
}

/// One use of a parameter group in a forward pass.
#[derive(Debug, Default)]
pub(crate) struct Use {
    /// Set once a gradient of this use has arrived.
    has_gradient: AtomicBool,
}

impl std::fmt::Debug for ParamGroup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ParamGroup({})", self.layout.name)
    }
}

impl ParamGroup {
    /// Creates a parameter group from `master`, this rank's shard in f32.
    pub(crate) fn new(
        layout: ParamGroupLayout,
        options: GroupOptions,
        master: Buffer,
        context: Arc<CommContext>,
        reducer: Arc<Reducer>,
    ) -> Self {
        ParamGroup {
            label: layout.name.as_str().into(),
            layout,
            options,
            context,
            reducer,
            neighbours: OnceLock::new(),
            state: Mutex::new(GroupState::new(master)),
        }
    }

    /// Sets which groups forward and backward need next. Called once, when all modules have been added.
    pub(crate) fn set_neighbours(&self, neighbours: Neighbours) {
        // A second call would set the same groups: an engine is built once.
        let _ = self.neighbours.set(neighbours);
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, GroupState> {
        lock(&self.state)
    }

    /// Records that the calling rank has entered the module of this group.
    pub(crate) fn enter(&self) {
        memory::enter_module(self.options.position);
        self.context.world.recorder().enter_module(&self.label);
    }

    pub(crate) fn label(&self, phase: kiln_collectives::Phase) -> Label {
        Label::new(self.label.clone(), phase)
    }

    /// Starts gathering the weights unless they are in memory or already being gathered.
    pub(crate) fn unshard(&self, direction: Direction) {
        let mut state = self.state();
        if matches!(state.weights, Weights::Sharded)
            && !self.context.failed()
            && let Some(weights) = self.context.or_fail(self.start_unshard(&mut state, direction))
        {
            state.weights = weights;
        }
    }

    fn start_unshard(&self, state: &mut GroupState, direction: Direction) -> Result<Weights, ShardError> {
        let context = &self.context;
        let dtype = context.policy.compute_dtype;
        let compute_shard = if self.keeps_compute_shard() { Some(self.compute_shard(state)?) } else { None };
        let master = &state.master;
        let Some(group) = &context.shard else {
            let weights = if let Some(compute_shard) = compute_shard {
                FlatWeights::shared(compute_shard)
            } else if dtype == DType::F32 {
                FlatWeights::shared(master.clone())
            } else {
                let mut whole = context.gather_buffer(dtype, master.len());
                buffers::cast_from_f32(master, &mut whole)?;
                self.gathered(whole, self.counted(None))
            };
            return Ok(Weights::Unsharded(weights));
        };
        let shard = match compute_shard {
            Some(compute_shard) => compute_shard,
            None if dtype == DType::F32 => master.clone(),
            None => Arc::new(buffers::cast_to(master, dtype)?),
        };
        let numel = self.layout.padded_numel();
        let (whole, held) = if group.shares_gathers() && shard.is_on_host() {
            (Buffer::unallocated(dtype, numel), Some(Held::new(numel * dtype.size())))
        } else {
            (context.gather_buffer(dtype, numel), None)
        };
        let counted = self.counted(held);
        let work = group.all_gather(self.label(direction.phase()), shard, whole);
        Ok(Weights::Unsharding { work, counted })
    }

    fn keeps_compute_shard(&self) -> bool {
        let context = &self.context;
        let (on_host, holds_copy) = (context.placement().is_host(), context.shard.is_none());
        context.policy.keeps_compute_shard(on_host, holds_copy, self.options.reshard_after_forward)
    }

    /// Returns this rank's shard in the compute dtype, which is kept on the GPU.
    fn compute_shard(&self, state: &mut GroupState) -> Result<Arc<Buffer>, ShardError> {
        if let Some(shard) = &state.compute_shard {
            return Ok(shard.clone());
        }
        let cast = match self.context.policy.compute_dtype {
            DType::F32 => Cow::Borrowed(&*state.master),
            dtype => Cow::Owned(owned_by(MemoryOwner::Weights, || buffers::cast_to(&state.master, dtype))?),
        };
        let shard = match self.context.offloads() {
            true => Arc::new(self.context.placement().place(cast)),
            // The master weights are on the GPU, and so is the result of the cast.
            false => Arc::new(cast.into_owned()),
        };
        state.compute_shard = Some(shard.clone());
        Ok(shard)
    }

    /// Handles an update of the master weights, which has also written the compute shard if it `is_written`. With
    /// offload, sends the new weights to the GPU.
    pub(crate) fn refresh_compute_shard(
        &self,
        state: &mut GroupState,
        is_written: bool,
    ) -> Result<(), ShardError> {
        if !is_written {
            state.compute_shard = None;
        }
        if self.context.offloads() {
            self.compute_shard(state)?;
        }
        Ok(())
    }

    fn counted(&self, held: Option<Held>) -> Counted {
        let streams = self.options.reshard_after_forward;
        Counted { _group: streams.then(|| UnshardedGroup::new(&self.context.unsharded)), _bytes: held }
    }

    /// Returns the whole weights, gathering them if necessary. In forward, it then starts gathering the next module,
    /// so that the transfer overlaps with this module's computation. In backward, the boundary at the module's output
    /// has already done that.
    pub(crate) fn wait_for_unshard(&self, direction: Direction) -> FlatWeights {
        self.context.keep_awake();
        self.unshard(direction);
        let weights = self.unsharded();
        if direction == Direction::Forward {
            self.prefetch_in_forward();
        }
        weights
    }

    fn unsharded(&self) -> FlatWeights {
        let mut state = self.state();
        let weights = match std::mem::replace(&mut state.weights, Weights::Sharded) {
            Weights::Unsharded(weights) => weights,
            Weights::Unsharding { work, counted } => {
                let buffer = self.context.wait(work).unwrap_or_else(|| self.zeros());
                self.gathered(buffer, counted)
            }
            // Only after a failure: the pass continues with zeros until the failure is checked.
            Weights::Sharded => self.gathered(self.zeros(), Counted::default()),
        };
        state.weights = Weights::Unsharded(weights.clone());
        weights
    }

    fn gathered(&self, whole: Buffer, counted: Counted) -> FlatWeights {
        let pool = self.reshards_after_forward().then(|| self.context.pool.clone());
        FlatWeights::gathered(Gathered::new(whole, pool, counted))
    }

    fn zeros(&self) -> Buffer {
        let dtype = self.context.policy.compute_dtype;
        self.context.placement().zeros(dtype, self.layout.padded_numel())
    }

    /// Gathers the weights for backward, unless they are in memory or backward does not read them.
    pub(crate) fn unshard_in_backward(&self) {
        if self.options.unshard_in_backward {
            self.unshard(Direction::Backward);
        }
    }

    /// Starts gathering the next module of a forward pass. Modules are used in order; for a module that is used again
    /// (a tied embedding under the head), the next one has already been gathered.
    fn prefetch_in_forward(&self) {
        let position = self.options.position;
        if self.context.forward_position.fetch_max(position, Ordering::Relaxed) <= position {
            let next = self.neighbours.get().map_or(&[][..], |neighbours| &neighbours.next);
            unshard_all(next, Direction::Forward);
        }
    }

    /// Starts gathering the module whose weights backward reads after this module's.
    pub(crate) fn prefetch_in_backward(&self) {
        match self.neighbours.get().map_or(&[][..], |neighbours| &neighbours.previous) {
            [] => self.context.pool.close(),
            previous => unshard_all(previous, Direction::Backward),
        }
    }

    /// Returns parameter `index` as a tensor, gathering the group if necessary.
    pub(crate) fn parameter<B: FlatTensors>(
        &self,
        token: &FloatTensor<B>,
        index: usize,
        direction: Direction,
    ) -> FloatTensor<B> {
        let weights = self.wait_for_unshard(direction);
        let parameter = &self.layout.parameters[index];
        let dtype = self.context.policy.compute_dtype;
        B::view(&weights, token, &parameter.shape, parameter.offset, dtype)
    }

    /// Frees the whole weights. Waits for a gather in progress, because the other ranks take part in it.
    pub(crate) fn reshard(&self) {
        let weights = std::mem::replace(&mut self.state().weights, Weights::Sharded);
        match weights {
            Weights::Sharded => {}
            Weights::Unsharding { work, .. } => {
                if let Some(buffer) = self.context.wait(work) {
                    self.context.pool.put(buffer);
                }
            }
            Weights::Unsharded(weights) => {
                let is_f32 = self.context.policy.compute_dtype == DType::F32;
                let stays = self.context.shard.is_none() && (is_f32 || self.keeps_compute_shard());
                if weights.has_views() && !stays {
                    self.context.report_pinned(&self.layout.name);
                }
            }
        }
    }

    /// Returns whether the weights are on burn's tape, if the module is. Frozen weights are, so that backward can
    /// gather them again, unless it does not read them or strategies keep them anyway.
    pub(crate) fn is_on_tape(&self) -> bool {
        let GroupOptions { reshard_after_forward, unshard_in_backward, .. } = self.options;
        self.layout.trainable || (reshard_after_forward && unshard_in_backward)
    }

    /// Frees the whole weights after forward. Constants that operations on burn's `tape` may have saved are kept until
    /// backward, even if this rank's batch has not used them: every rank must free the same weights.
    pub(crate) fn reshard_after_forward(&self, tape: bool) {
        let stays = tape && self.options.unshard_in_backward && !self.is_on_tape();
        if self.reshards_after_forward() && !stays {
            self.reshard();
        }
    }

    /// Returns `true` if the weights are freed between forward and backward.
    pub(crate) fn reshards_after_forward(&self) -> bool {
        self.context.policy.reshards_after_forward(self.options.reshard_after_forward)
    }

    /// Registers a use of the group whose backward has yet to run.
    pub(crate) fn open_use(&self) {
        self.state().open_uses += 1;
    }

    /// Adds the gradient of parameter `index` from one use.
    pub(crate) fn accumulate<B: FlatTensors>(&self, index: usize, from: &Use, gradient: FloatTensor<B>) {
        if self.context.failed() {
            return;
        }
        if !from.has_gradient.swap(true, Ordering::Relaxed) {
            self.before_first_gradient();
        }
        let parameter = &self.layout.parameters[index];
        let added = match &mut self.state().gradient {
            Gradient::Accumulating { flat, written, .. } => {
                let added = B::add_gradient(flat, parameter.range(), gradient, !written[index]);
                added.map(|()| written[index] = true)
            }
            _ => Err("arrived after its parameter group was reduced".to_owned()),
        };
        if let Err(reason) = added {
            self.context.fail(ShardError::Gradient { name: parameter.name.clone(), reason });
        }
    }

    /// Frees the weights to make room for the gradient. On the tape, a gather precedes every operation that reads its
    /// result, so once backward delivers the first gradient of a use, that use reads the weights no more.
    fn before_first_gradient(&self) {
        self.reshard_after_use();
        self.open_gradient(&mut self.state());
    }

    /// Allocates the flat gradient of this micro-batch, unless it exists.
    fn open_gradient(&self, state: &mut GroupState) {
        let earlier = match std::mem::replace(&mut state.gradient, Gradient::None) {
            Gradient::None => None,
            Gradient::Partial(sum) => Some(sum),
            other => {
                state.gradient = other;
                return;
            }
        };
        let flat = self.reducer.take_buffer(self.layout.padded_numel());
        let written = vec![false; self.layout.parameters.len()];
        state.gradient = Gradient::Accumulating { flat, written, earlier };
    }

    /// Frees the weights after backward has read them for the last time in this use, unless another use or
    /// micro-batch will read them again.
    fn reshard_after_use(&self) {
        let last_use = self.state().open_uses <= 1;
        let done = last_use || !self.options.unshard_in_backward;
        if self.reshards_after_forward() || (done && self.context.is_last_micro_batch()) {
            self.reshard();
        }
    }

    /// Ends the backward of one use. After the last use, starts the gradient's reduction if this micro-batch is
    /// reduced.
    pub(crate) fn leave_backward(&self) {
        if self.context.failed() {
            return;
        }
        self.reshard_after_use();
        let mut state = self.state();
        state.open_uses = state.open_uses.saturating_sub(1);
        let complete = state.open_uses == 0;
        drop(state);
        if complete && self.context.reduces() {
            self.post_backward();
        }
    }

    /// Starts the gradient's reduction, once per backward pass that reduces. Parameters without a gradient count as
    /// zero, because every rank must take part in the same reductions.
    pub(crate) fn post_backward(&self) {
        if !self.layout.trainable {
            return;
        }
        let mut state = self.state();
        self.open_gradient(&mut state);
        let (mut flat, written, earlier) = match std::mem::replace(&mut state.gradient, Gradient::Taken) {
            Gradient::Accumulating { flat, written, earlier } => (flat, written, earlier),
            sent => {
                state.gradient = sent;
                return;
            }
        };
        state.open_uses = 0;
        let parameters = self.layout.parameters.iter().zip(written);
        let unwritten = parameters.filter(|(_, written)| !*written);
        let unwritten = unwritten.map(|(parameter, _)| parameter.range());
        let cleared = buffers::clear(&mut flat, self.layout.gaps().into_iter().chain(unwritten));
        let label = self.label(Direction::Backward.phase());
        let reduction = cleared.map_err(ShardError::from);
        let reduction = reduction.and_then(|()| self.reducer.launch(label, flat, earlier));
        if let Some(reduction) = self.context.or_fail(reduction) {
            state.gradient = Gradient::Reducing(reduction);
        }
    }

    /// With replicas, waits until they have summed the gradient, and starts moving it to the memory where the
    /// optimizer runs.
    pub(crate) fn start_arrival(&self) {
        if let Gradient::Reducing(reduction) = &self.state().gradient {
            self.reducer.start_arrival(reduction);
        }
    }

    /// Waits for this rank's shard of the reduced gradient. In the last micro-batch, it is the gradient of the whole
    /// step; in earlier ones, the sum so far.
    pub(crate) fn wait_for_reduced(&self) {
        let mut state = self.state();
        if let Gradient::Reducing(reduction) = &state.gradient {
            let there = match self.context.is_last_micro_batch() {
                true => Gradient::Reduced,
                false => Gradient::Partial,
            };
            state.gradient = self.reducer.wait(reduction).map_or(Gradient::Taken, there);
        }
    }

    /// Prepares for the next step: discards the previous gradient and forgets unfinished uses.
    pub(crate) fn begin_step(&self) {
        let mut state = self.state();
        state.open_uses = 0;
        state.gradient = Gradient::None;
    }
}

fn unshard_all(groups: &[Weak<ParamGroup>], direction: Direction) {
    groups.iter().filter_map(Weak::upgrade).for_each(|group| group.unshard(direction));
}
