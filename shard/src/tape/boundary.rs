//! The boundaries at which backward enters and leaves a module, as operations on burn's tape.
//!
//! Both are the identity in forward. In backward, the boundary on a module's output gathers the weights and starts
//! gathering those of the previous module; the boundary on its input frees the weights and starts reducing the
//! gradients. They correspond to FSDP2's pre-backward and post-backward hooks.
//!
//! Every rank passes a boundary, no matter which parameters of the module its batch uses. The first read of a weight,
//! or the last gradient of a parameter, would not suffice: a rank whose batch uses no such parameter would issue its
//! collectives in a different order from the others.

use burn::backend::autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops},
};
use burn::backend::{Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;

use super::node::{Tracked, on_tape};
use crate::buffers::FlatTensors;
use crate::param_group::ParamGroups;

/// The groups of a module at whose output there is a boundary.
#[derive(Clone, Debug)]
pub(crate) struct Output {
    groups: ParamGroups,
    /// True if backward continues to the previous module.
    goes_on: bool,
}

#[backend_extension(Flex, Cube: cfg(feature = "cube"), Autodiff)]
pub(crate) trait BoundaryOps: Backend {
    /// Returns `y`, on the tape if `token` is.
    fn output(y: FloatTensor<Self>, token: FloatTensor<Self>, at: Output) -> FloatTensor<Self>;
    /// Returns `x`.
    fn input(x: FloatTensor<Self>, groups: ParamGroups) -> FloatTensor<Self>;
}

/// Returns `y`, the output of the module of `groups`. When backward reaches `y`, it gathers the module's weights and,
/// if it `goes_on` to the previous module, starts gathering that module's weights. `token` is the module's token: it
/// puts `y` on the tape even if `y` depends on no trained weight.
pub(crate) fn at_output<const D: usize>(
    y: Tensor<D>,
    token: &Tensor<1>,
    groups: ParamGroups,
    goes_on: bool,
) -> Tensor<D> {
    let token = token.clone().into_dispatch();
    Tensor::from_dispatch(Dispatch::output(y.into_dispatch(), token, Output { groups, goes_on }))
}

/// Returns `x`, the input of the module of `groups`. When backward reaches `x`, it frees the module's weights and
/// starts reducing the gradients.
pub(crate) fn at_input<const D: usize>(x: Tensor<D>, groups: ParamGroups) -> Tensor<D> {
    Tensor::from_dispatch(Dispatch::input(x.into_dispatch(), groups))
}

/// Handles that backward has reached the output of the module of `groups`.
fn enter(groups: &ParamGroups, goes_on: bool) {
    groups.iter().for_each(|group| group.unshard_in_backward());
    match groups.first() {
        Some(first) if goes_on => first.prefetch_in_backward(),
        Some(first) => first.context.pool.close(),
        None => {}
    }
    groups.iter().take(1).for_each(|group| group.enter());
}

/// Handles the beginning of backward at the loss, which was computed by the last module, that of `groups`.
pub(crate) fn begin_backward(groups: &ParamGroups) {
    enter(groups, true);
}

impl<B: FlatTensors> BoundaryOps for B {
    fn output(y: FloatTensor<B>, _token: FloatTensor<B>, _at: Output) -> FloatTensor<B> {
        y
    }

    fn input(x: FloatTensor<B>, _groups: ParamGroups) -> FloatTensor<B> {
        x
    }
}

#[derive(Debug)]
struct OutputBackward;

impl<B: Backend> Backward<B, 2> for OutputBackward {
    type State = Output;

    fn backward(self, ops: Ops<Output, 2>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        enter(&ops.state.groups, ops.state.goes_on);
        if let [Some(parent), _token] = ops.parents {
            grads.register::<B>(parent.id, gradient);
        }
    }
}

#[derive(Debug)]
struct InputBackward;

impl<B: Backend> Backward<B, 1> for InputBackward {
    type State = ParamGroups;

    fn backward(self, ops: Ops<ParamGroups, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        ops.state.iter().for_each(|group| group.leave_backward());
        if let [Some(parent)] = ops.parents {
            grads.register::<B>(parent.id, gradient);
        }
    }
}

// Tensors are moved, not cloned, so that an unshared tensor can be changed in place.
impl<B: Backend, C: CheckpointStrategy> BoundaryOps for Autodiff<B, C> {
    fn output(y: Tracked<B, C>, token: Tracked<B, C>, at: Output) -> Tracked<B, C> {
        on_tape::<B, C, _, _>(OutputBackward, [y.node(), token.node()], at, y.into_primitive())
    }

    fn input(x: Tracked<B, C>, groups: ParamGroups) -> Tracked<B, C> {
        on_tape::<B, C, _, _>(InputBackward, [x.node()], groups, x.into_primitive())
    }
}
