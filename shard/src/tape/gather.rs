//! Reading a sharded parameter, as an operation on burn's tape.
//!
//! Forward gathers the parameter group and returns a view. Backward passes the gradient to the group. The node can be
//! recomputed on its own, so the tape holds no weights between forward and backward. This includes frozen weights: they
//! are on the tape so that backward can gather them again, and their gradient is not computed by operations that know
//! the mark ([`EngineBuilder::mark_frozen`](crate::EngineBuilder::mark_frozen)), and discarded otherwise.
//!
//! Backward steps run by depth. A gather that depended on a leaf would run last and keep all gradients alive until
//! then, so it depends on an *order token*: a one-element child of the block's input that carries no gradient.

use std::marker::PhantomData;
use std::sync::Arc;

use burn::backend::autodiff::{
    Autodiff, NodeId,
    checkpoint::{
        base::Checkpointer,
        retro_forward::RetroForward,
        state::BackwardStates,
        strategy::{BalancedCheckpointing, CheckpointStrategy},
    },
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::{Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::{Shape, Tensor};
use burn_backend::TensorMetadata;

use super::node::{Tracked, on_tape};
use crate::buffers::FlatTensors;
use crate::comm::Direction;
use crate::param_group::{ParamGroup, ParamGroups, Use};

/// The parameter to read, and the [`Use`] that collects its gradient.
#[derive(Clone, Debug)]
pub(crate) struct WeightRef {
    pub(crate) group: Arc<ParamGroup>,
    /// Index of the parameter in the group's layout.
    pub(crate) index: usize,
    pub(crate) direction: Direction,
    /// The [`Use`] that collects the gradient; ignored for frozen parameters.
    pub(crate) from: Arc<Use>,
}

impl WeightRef {
    fn shape(&self) -> &[usize] {
        &self.group.layout.parameters[self.index].shape
    }
}

#[backend_extension(Flex, Cube: cfg(feature = "cube"), Autodiff)]
pub(crate) trait GatherOps: Backend {
    /// Returns a one-element child of `x` without gradient. When backward reaches the child, all gathers that depend
    /// on it have their gradients, and backward leaves the groups `leaves`.
    fn order_token(x: FloatTensor<Self>, leaves: ParamGroups) -> FloatTensor<Self>;
    /// Returns the parameter that `weight` refers to, in the compute dtype.
    fn gather(token: FloatTensor<Self>, weight: WeightRef) -> FloatTensor<Self>;
}

/// Returns a one-element child of `x` without gradient, as deep in the graph as `x`. Backward leaves the groups
/// `leaves` when it reaches the child.
pub(crate) fn order_token<const D: usize>(x: &Tensor<D>, leaves: ParamGroups) -> Tensor<1> {
    Tensor::from_dispatch(Dispatch::order_token(x.clone().into_dispatch(), leaves))
}

/// Returns the parameter that `weight` refers to; on the tape if `token` is.
pub(crate) fn gather<const D: usize>(token: &Tensor<1>, weight: WeightRef) -> Tensor<D> {
    Tensor::from_dispatch(Dispatch::gather(token.clone().into_dispatch(), weight))
}

impl<B: FlatTensors> GatherOps for B {
    fn order_token(x: FloatTensor<B>, _leaves: ParamGroups) -> FloatTensor<B> {
        B::token(&x)
    }

    fn gather(token: FloatTensor<B>, weight: WeightRef) -> FloatTensor<B> {
        weight.group.parameter::<B>(&token, weight.index, weight.direction)
    }
}

#[derive(Debug)]
struct OrderTokenBackward;

impl<B: Backend> Backward<B, 1> for OrderTokenBackward {
    type State = ParamGroups;

    fn backward(self, ops: Ops<ParamGroups, 1>, _grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        ops.state.iter().for_each(|group| group.leave_backward());
    }
}

#[derive(Debug)]
struct GatherBackward;

/// The state of a gather on the tape.
#[derive(Clone, Debug)]
struct GatherState<B: Backend> {
    weight: WeightRef,
    /// For a frozen weight, one element in each dimension, in place of the gradient that is not needed.
    no_gradient: Option<FloatTensor<B>>,
}

impl<B: FlatTensors> Backward<B, 1> for GatherBackward {
    type State = GatherState<B>;

    fn backward(self, ops: Ops<GatherState<B>, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let GatherState { weight, no_gradient } = ops.state;
        match no_gradient {
            None => {
                let gradient = grads.consume::<B>(&ops.node);
                weight.group.accumulate::<B>(weight.index, &weight.from, gradient);
            }
            // Operations that do not know that the weight is frozen have registered its gradient, others nothing. burn
            // fails if there is nothing to remove.
            Some(placeholder) => {
                let shape = Shape::from(weight.shape());
                grads.register::<B>(ops.node.id, B::float_expand(placeholder, shape));
                drop(grads.consume::<B>(&ops.node));
            }
        }
    }
}

#[derive(Debug)]
struct GatherAgain<B> {
    token: NodeId,
    weight: WeightRef,
    backend: PhantomData<fn() -> B>,
}

impl<B: FlatTensors> RetroForward for GatherAgain<B> {
    fn forward(&self, states: &mut BackwardStates, out_node: NodeId) {
        // Taking the token's state also informs the checkpointer that it has been used.
        let token = states.get_state::<FloatTensor<B>>(&self.token);
        let weight = self.weight.group.parameter::<B>(&token, self.weight.index, Direction::Backward);
        states.save(out_node, weight);
    }
}

impl<B: FlatTensors, C: CheckpointStrategy> GatherOps for Autodiff<B, C> {
    fn order_token(x: Tracked<B, C>, leaves: ParamGroups) -> Tracked<B, C> {
        on_tape::<B, C, _, _>(OrderTokenBackward, [x.node()], leaves, B::token(x.primitive()))
    }

    fn gather(token: Tracked<B, C>, weight: WeightRef) -> Tracked<B, C> {
        let out = weight.group.parameter::<B>(token.primitive(), weight.index, weight.direction);
        let again = GatherAgain::<B> { token: token.id(), weight: weight.clone(), backend: PhantomData };
        // `BalancedCheckpointing` here, not `C`: this node is recomputed under every strategy.
        let prepared = Backward::<B, 1>::prepare::<BalancedCheckpointing>(GatherBackward, [token.node()])
            .memory_bound()
            .retro_forward(again)
            .parents::<B, _>([&token])
            .stateful();
        match prepared {
            OpsKind::UnTracked(prepared) => prepared.finish(out),
            OpsKind::Tracked(prepared) if weight.group.layout.trainable => {
                prepared.finish(GatherState { weight, no_gradient: None }, out)
            }
            OpsKind::Tracked(prepared) => {
                let (ones, device) = (Shape::from(vec![1; weight.shape().len()]), out.device());
                let no_gradient = Some(B::float_empty(ones, &device, out.dtype().into()));
                let context = weight.group.context.clone();
                let out = prepared.finish(GatherState { weight, no_gradient }, out);
                context.mark_frozen(out.id());
                out
            }
        }
    }
}
