//! Reading a sharded parameter, as an operation on burn's tape.
//!
//! Forward gathers the unit and returns a view. Backward hands the gradient to the unit. The node
//! recomputes itself on demand, whatever the rest of the graph does, so the tape holds no weights
//! between forward and backward.
//!
//! Backward steps run by depth. A gather that hung off a leaf would run last and keep all
//! gradients alive to the end, so it hangs off an *order token*: a one-element child of the
//! block's input that carries no gradient.

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
use burn::backend::{Dispatch, Flex, backend_extension, tensor::FloatTensor};
use burn::tensor::{DType, Shape, Tensor};
use burn_flex::FlexTensor;
use kiln_collectives::Phase;

use crate::unit::{Unit, Use};

/// Which parameter to read, and for which use.
#[derive(Clone, Debug)]
pub(crate) struct WeightRef {
    pub(crate) unit: Arc<Unit>,
    pub(crate) slot: usize,
    pub(crate) phase: Phase,
    /// Counts down the gradients of this use; unread by frozen parameters.
    pub(crate) from: Arc<Use>,
}

#[backend_extension(Flex, Autodiff)]
pub(crate) trait GatherOps: burn::backend::Backend {
    /// A one-element child of `x` without gradient.
    fn order_token(x: FloatTensor<Self>) -> FloatTensor<Self>;
    /// The parameter that `weight` names, in the compute dtype.
    fn gather(token: FloatTensor<Self>, weight: WeightRef) -> FloatTensor<Self>;
}

/// A one-element child of `x` without gradient, as deep in the graph as `x`.
pub(crate) fn order_token<const D: usize>(x: &Tensor<D>) -> Tensor<1> {
    Tensor::from_dispatch(Dispatch::order_token(x.clone().into_dispatch()))
}

/// The parameter that `weight` names; on the tape if `token` is.
pub(crate) fn gather<const D: usize>(token: &Tensor<1>, weight: WeightRef) -> Tensor<D> {
    Tensor::from_dispatch(Dispatch::gather(token.clone().into_dispatch(), weight))
}

fn token() -> FlexTensor {
    FlexTensor::zeros(Shape::new([1]), DType::F32)
}

impl GatherOps for Flex {
    fn order_token(_x: FlexTensor) -> FlexTensor {
        token()
    }

    fn gather(_token: FlexTensor, weight: WeightRef) -> FlexTensor {
        weight.unit.parameter(weight.slot, weight.phase)
    }
}

#[derive(Debug)]
struct OrderTokenBackward;

impl Backward<Flex, 1> for OrderTokenBackward {
    type State = ();

    fn backward(self, _ops: Ops<(), 1>, _grads: &mut Gradients, _checkpointer: &mut Checkpointer) {}
}

#[derive(Debug)]
struct GatherBackward;

impl Backward<Flex, 1> for GatherBackward {
    type State = WeightRef;

    fn backward(
        self,
        ops: Ops<WeightRef, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let gradient = grads.consume::<Flex>(&ops.node);
        let weight = ops.state;
        weight.unit.accumulate(weight.slot, &weight.from, gradient);
    }
}

#[derive(Debug)]
struct GatherAgain {
    token: NodeId,
    weight: WeightRef,
}

impl RetroForward for GatherAgain {
    fn forward(&self, states: &mut BackwardStates, out_node: NodeId) {
        // Taking the token's state tells the checkpointer that it has been used.
        let _ = states.get_state::<FlexTensor>(&self.token);
        let weight = self.weight.unit.parameter(self.weight.slot, Phase::Backward);
        states.save(out_node, weight);
    }
}

type Tracked<C> = FloatTensor<Autodiff<Flex, C>>;

impl<C: CheckpointStrategy> GatherOps for Autodiff<Flex, C> {
    fn order_token(x: Tracked<C>) -> Tracked<C> {
        OrderTokenBackward.prepare::<C>([x.node()]).compute_bound().stateless(token())
    }

    fn gather(token: Tracked<C>, weight: WeightRef) -> Tracked<C> {
        let out = weight.unit.parameter(weight.slot, weight.phase);
        let again = GatherAgain { token: token.id(), weight: weight.clone() };
        // `BalancedCheckpointing` here, not `C`: this node is recomputed under every strategy.
        let prepared = GatherBackward
            .prepare::<BalancedCheckpointing>([token.node()])
            .memory_bound()
            .retro_forward(again)
            .parents::<Flex, _>([&token])
            .stateful();
        match prepared {
            OpsKind::Tracked(prepared) => prepared.finish(weight, out),
            OpsKind::UnTracked(prepared) => prepared.finish(out),
        }
    }
}
