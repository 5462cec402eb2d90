//! The loss at the start of backward: summed on its device, and scaled if gradients are `f16`.

use std::sync::{Arc, Mutex};

use burn::backend::autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops},
};
use burn::backend::{Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;

use super::boundary::begin_backward;
use super::node::{Tracked, on_tape};
use crate::buffers::{DeviceScalar, FlatTensors, LossSum};
use crate::comm::CommContext;
use crate::error::ShardError;
use crate::param_group::ParamGroups;
use crate::sync::lock;

/// The state that the loss operation needs in a backward pass.
#[derive(Clone)]
pub(crate) struct LossSink {
    /// The sum of the losses of the step.
    pub(crate) sum: Arc<Mutex<LossSum>>,
    /// The gradient with which backward starts instead of 1, if gradients are `f16`.
    pub(crate) scale: Option<DeviceScalar>,
    /// The groups of the last module, which computed the loss.
    pub(crate) last: ParamGroups,
    pub(crate) context: Arc<CommContext>,
}

impl std::fmt::Debug for LossSink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("LossSink")
    }
}

#[backend_extension(Flex, Cube: cfg(feature = "cube"), Autodiff)]
pub(crate) trait LossOps: Backend {
    /// Adds `loss` to the loss of the step and returns `loss`. Its backward starts from the loss scale.
    fn add_loss(loss: FloatTensor<Self>, sink: LossSink) -> FloatTensor<Self>;
}

/// Adds `loss` `[1]` to the loss of the step. Backward must start from the result.
pub(crate) fn add_loss(loss: Tensor<1>, sink: LossSink) -> Tensor<1> {
    Tensor::from_dispatch(Dispatch::add_loss(loss.into_dispatch(), sink))
}

fn add<B: FlatTensors>(loss: &FloatTensor<B>, sink: &LossSink) {
    if let Err(reason) = B::add_loss(loss, &mut lock(&sink.sum)) {
        sink.context.fail(ShardError::Gradient { name: "the loss".to_owned(), reason });
    }
}

impl<B: FlatTensors> LossOps for B {
    fn add_loss(loss: FloatTensor<B>, sink: LossSink) -> FloatTensor<B> {
        add::<B>(&loss, &sink);
        loss
    }
}

#[derive(Debug)]
struct LossBackward;

impl<B: FlatTensors> Backward<B, 1> for LossBackward {
    type State = LossSink;

    fn backward(self, ops: Ops<LossSink, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let [Some(parent)] = ops.parents else { return };
        let LossSink { scale, last, .. } = ops.state;
        begin_backward(&last);
        let gradient = match &scale {
            Some(scale) => B::scaled(gradient, scale),
            None => gradient,
        };
        grads.register::<B>(parent.id, gradient);
    }
}

impl<B: FlatTensors, C: CheckpointStrategy> LossOps for Autodiff<B, C> {
    fn add_loss(loss: Tracked<B, C>, sink: LossSink) -> Tracked<B, C> {
        add::<B>(loss.primitive(), &sink);
        on_tape::<B, C, _, _>(LossBackward, [loss.node()], sink, loss.primitive().clone())
    }
}
