//! A module whose weights are in memory only while it runs.

use std::ops::Deref;
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device, GradientCheckpointingStrategy, Tensor};

use crate::comm::{CommContext, Direction};
use crate::error::ShardError;
use crate::param_group::{ParamGroup, ParamGroups, Use};
use crate::policy::Recompute;
use crate::tape::{BlockOutput, Body, Run, WeightRef, at_input, at_output, gather, order_token, recompute};

/// Sharding options of a module.
#[derive(Clone, Copy, Debug)]
pub struct ShardOptions {
    /// True if the strategy may free the weights between forward and backward. `false` for the last module, which
    /// backward needs immediately, and for a module that forward uses twice.
    pub reshard_after_forward: bool,
    /// True if backward reads the weights' values (an embedding's backward does not).
    pub unshard_in_backward: bool,
    /// Index among the blocks, by which [`Recompute::Every`] chooses.
    pub block: usize,
}

impl Default for ShardOptions {
    fn default() -> Self {
        ShardOptions { reshard_after_forward: true, unshard_in_backward: true, block: 0 }
    }
}

/// A module of type `M` whose parameters are sharded over the ranks. Cheap to clone.
pub struct ShardedModule<M> {
    inner: Arc<Inner<M>>,
}

impl<M> Clone for ShardedModule<M> {
    fn clone(&self) -> Self {
        ShardedModule { inner: self.inner.clone() }
    }
}

struct Inner<M> {
    /// The module with empty tensors instead of its parameters.
    template: M,
    /// The group and index of each float parameter, in the order in which a [`ModuleMapper`] visits them.
    places: Vec<ParameterPlace>,
    /// One group for the trainable and one for the frozen parameters, if there are any.
    groups: ParamGroups,
    context: Arc<CommContext>,
    /// Index among the blocks.
    block: usize,
}

/// The place of a parameter among the groups of its module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ParameterPlace {
    /// Index among the module's groups.
    pub(crate) group: usize,
    /// Index in the group's layout.
    pub(crate) parameter: usize,
}

/// Determines where on burn's tape weights are read. Backward runs by depth, so a weight that was read with this
/// token has its gradient when backward reaches the token. The token's values are never read.
pub struct OrderToken {
    tracked: Tensor<1>,
    /// The token for weights that backward needs no gradient of and does not gather again: a constant.
    constant: Tensor<1>,
    direction: Direction,
    /// The position of the module that backward leaves at this token's parent, the module's input, if it leaves
    /// there; see [`ShardedModule::enter`].
    entered: Option<usize>,
}

impl OrderToken {
    /// Creates a token for a module without differentiable input, such as an embedding.
    pub(crate) fn root(device: &Device) -> Self {
        let constant = Tensor::empty([1], device);
        let tracked =
            if device.is_autodiff() { Tensor::empty([1], device).require_grad() } else { constant.clone() };
        OrderToken { tracked, constant, direction: Direction::Forward, entered: None }
    }

    /// Creates a token for a module that reads `x`.
    pub fn from_input<const D: usize>(x: &Tensor<D>) -> Self {
        let device = x.device();
        if !x.is_tracked() {
            return OrderToken::root(&device);
        }
        OrderToken {
            tracked: order_token(x, ParamGroups::new()),
            constant: Tensor::empty([1], &device),
            direction: Direction::Forward,
            entered: None,
        }
    }

    /// Creates a child of this token, at which backward leaves `groups`.
    fn leaving(&self, groups: &[Arc<ParamGroup>]) -> Self {
        OrderToken {
            tracked: order_token(&self.tracked, groups.to_vec()),
            constant: self.constant.clone(),
            direction: self.direction,
            entered: None,
        }
    }

    fn in_backward(self) -> Self {
        OrderToken { direction: Direction::Backward, ..self }
    }

    fn is_tracked(&self) -> bool {
        self.tracked.is_tracked()
    }
}

/// A module with its weights in memory; dereferences to the module. Dropping it frees the weights, unless the policy
/// keeps them for backward.
pub struct Unsharded<M> {
    module: Option<M>,
    groups: ParamGroups,
    after: After,
}

/// The handling of the weights when the module that reads them is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum After {
    /// In forward, the policy decides whether to free them.
    Forward {
        /// True if burn's tape may hold the weights until backward.
        tape: bool,
    },
    /// In backward, they stay until backward leaves the module.
    Backward,
}

impl<M> Deref for Unsharded<M> {
    type Target = M;

    fn deref(&self) -> &M {
        match &self.module {
            Some(module) => module,
            None => unreachable!("invariant: the module is taken in drop only"),
        }
    }
}

impl<M> Drop for Unsharded<M> {
    fn drop(&mut self) {
        // The module's tensors are views: they must be dropped before the weights.
        self.module = None;
        if let After::Forward { tape } = self.after {
            self.groups.iter().for_each(|group| group.reshard_after_forward(tape));
        }
    }
}

impl<M: Module + Sync + 'static> ShardedModule<M> {
    pub(crate) fn new(
        template: M,
        places: Vec<ParameterPlace>,
        groups: ParamGroups,
        context: Arc<CommContext>,
        block: usize,
    ) -> Self {
        ShardedModule { inner: Arc::new(Inner { template, places, groups, context, block }) }
    }

    /// Returns `x`, and the token with which this module reads its weights. Backward leaves the module when it
    /// reaches `x`. So every rank leaves it at the same point in its sequence of collectives, regardless of which
    /// parameters its batch has used.
    pub fn enter<const D: usize>(&self, x: Tensor<D>) -> (Tensor<D>, OrderToken) {
        let (groups, entered) = (self.inner.groups.clone(), self.position());
        if !x.is_tracked() {
            // No earlier module is trained, so backward ends at the token.
            let token = OrderToken::root(&x.device()).leaving(&groups);
            return (x, OrderToken { entered, ..token });
        }
        let x = at_input(x, groups);
        let token = OrderToken { entered, ..OrderToken::from_input(&x) };
        (x, token)
    }

    /// Returns the module with its weights in memory. If `token` is on the tape, so are the weights. With a token of
    /// [`ShardedModule::enter`], backward leaves the module at its input. With other tokens, backward leaves it once
    /// the weights that the batch has used have their gradients or, on a rank whose batch has used none, at the end.
    pub fn unshard(&self, token: &OrderToken) -> Unsharded<M> {
        let after = After::Forward { tape: token.is_tracked() };
        if !token.is_tracked() {
            return self.materialize(token, after);
        }
        self.open_use();
        if token.entered.is_some() && token.entered == self.position() {
            self.materialize(token, after)
        } else {
            self.materialize(&token.leaving(&self.inner.groups), after)
        }
    }

    /// Computes `run(module, x)` with the weights in memory, and again in backward if the policy recomputes blocks.
    /// `run` maps `x` `[batch, seq, d_model]` to the same shape, and to a loss `[1]` that the module adds. It must
    /// depend only on its arguments and captures. If blocks are recomputed, tensors that leave `run` in any other way
    /// are not differentiated.
    ///
    /// Captured tensors must not need a gradient if blocks are recomputed, because backward would not reach them:
    /// [`Engine::check`](crate::Engine::check) then returns [`ShardError::Captured`]. Under [`Recompute::Selective`],
    /// captured tensors must be off the tape (`without_autodiff`): burn panics if tensors of one operation follow
    /// different checkpointing strategies.
    pub fn run(
        &self,
        x: Tensor<3>,
        run: impl Fn(&M, Tensor<3>) -> BlockOutput + Send + Sync + 'static,
    ) -> BlockOutput {
        // A frozen module before all trained modules has no backward.
        let goes_on = x.is_tracked();
        let is_trained =
            x.device().is_autodiff() && self.inner.groups.iter().any(|group| group.layout.trainable);
        if !goes_on && !is_trained {
            let after = After::Forward { tape: false };
            return run(&self.materialize(&OrderToken::from_input(&x), after), x);
        }
        let recompute = self.inner.context.policy.recompute;
        let strategy = x.gradient_checkpointing_strategy();
        let x = match recompute {
            Recompute::Selective => with_strategy(x, Some(SELECTIVE)),
            _ => x,
        };
        let (x, token) = self.enter(x);
        let (y, loss) = match recompute.repeats(self.inner.block) {
            false => run(&self.unshard(&token), x),
            true => self.run_twice(x, &token, run),
        };
        let y = at_output(y, &token.tracked, self.inner.groups.clone(), goes_on);
        // The other tensors of the pass have the strategy of its device.
        (with_strategy(y, strategy), loss.map(|loss| with_strategy(loss, strategy)))
    }

    /// Computes [`ShardedModule::run`] in forward, and again in backward.
    fn run_twice(
        &self,
        x: Tensor<3>,
        token: &OrderToken,
        run: impl Fn(&M, Tensor<3>) -> BlockOutput + Send + Sync + 'static,
    ) -> BlockOutput {
        // The use is opened here, in the forward pass; the second run continues it.
        self.open_use();
        let sharded = self.clone();
        let body = Body::new(move |x, pass| {
            let token = OrderToken::from_input(&x);
            match pass {
                Run::First => {
                    let module = sharded.materialize(&token, After::Forward { tape: false });
                    let (y, loss) = run(&module, x.clone());
                    if y.is_tracked() || loss.as_ref().is_some_and(Tensor::is_tracked) {
                        let group = sharded.inner.groups.first().map(|group| group.layout.name.clone());
                        let group = group.unwrap_or_default();
                        sharded.inner.context.fail(ShardError::Captured { group });
                        return (x, None);
                    }
                    // A captured constant may be a tensor of the tape's device.
                    (y.without_autodiff(), loss.map(Tensor::without_autodiff))
                }
                Run::Again => run(&sharded.materialize(&token.in_backward(), After::Backward), x),
            }
        });
        recompute(x, token.tracked.clone(), body)
    }

    /// Returns the position of the module's first group in the order of the forward pass.
    fn position(&self) -> Option<usize> {
        self.inner.groups.first().map(|group| group.options.position)
    }

    fn open_use(&self) {
        for group in self.inner.groups.iter().filter(|group| group.layout.trainable) {
            group.open_use();
        }
    }

    fn materialize(&self, token: &OrderToken, after: After) -> Unsharded<M> {
        let Inner { template, places, groups, .. } = &*self.inner;
        groups.iter().take(1).for_each(|group| group.enter());
        // Starts all gathers of the module before waiting for the first one.
        for group in groups {
            group.unshard(token.direction);
        }
        let uses = groups.iter().map(|_| Arc::default()).collect();
        let mut weights = Weights { token, places: places.iter(), groups, uses };
        let module = Some(template.clone().map(&mut weights));
        Unsharded { module, groups: groups.clone(), after }
    }
}

/// burn's strategy for [`Recompute::Selective`]: operations that are cheap to repeat save their operands.
const SELECTIVE: GradientCheckpointingStrategy = GradientCheckpointingStrategy::Balanced;

/// Returns `x` such that the operations that read it follow `strategy`. No effect on tensors without autodiff.
fn with_strategy<const D: usize>(x: Tensor<D>, strategy: Option<GradientCheckpointingStrategy>) -> Tensor<D> {
    match strategy {
        Some(strategy) if x.is_autodiff() => x.with_gradient_checkpointing_strategy(strategy),
        _ => x,
    }
}

/// Replaces the placeholders of a template with gathered weights.
struct Weights<'a> {
    token: &'a OrderToken,
    places: std::slice::Iter<'a, ParameterPlace>,
    groups: &'a [Arc<ParamGroup>],
    uses: Vec<Arc<Use>>,
}

impl ModuleMapper for Weights<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(&ParameterPlace { group: at, parameter: index }) = self.places.next() else {
            unreachable!("invariant: a template has the parameters it was made from");
        };
        let group = self.groups[at].clone();
        let token = if group.is_on_tape() { &self.token.tracked } else { &self.token.constant };
        let (direction, from) = (self.token.direction, self.uses[at].clone());
        Param::initialized(param.id, gather(token, WeightRef { group, index, direction, from }))
    }
}
