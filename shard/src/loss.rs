//! The loss on its way into backward: added up where it is, and scaled if gradients are `f16`.

use std::sync::Arc;

#[cfg(feature = "cube")]
use burn::backend::Cube;
use burn::backend::autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::{Backend, Dispatch, Flex, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;

use crate::boundary::begin_backward;
use crate::error::ShardError;
use crate::flat::FlatTensors;
use crate::runtime::{Runtime, lock};

/// Where the loss is added up, and what it is multiplied by.
#[derive(Clone)]
pub(crate) struct Sink(Arc<Runtime>);

impl std::fmt::Debug for Sink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Sink")
    }
}

#[backend_extension(Flex, Cube: cfg(feature = "cube"), Autodiff)]
pub(crate) trait LossOps: Backend {
    /// `loss`, which is added to the step's; backward starts at the scale of the loss.
    fn add_loss(loss: FloatTensor<Self>, sink: Sink) -> FloatTensor<Self>;
}

/// Adds `loss` `[1]` to that of the step. Backward is to start from what is returned.
pub(crate) fn add_loss(loss: Tensor<1>, runtime: &Arc<Runtime>) -> Tensor<1> {
    Tensor::from_dispatch(Dispatch::add_loss(loss.into_dispatch(), Sink(runtime.clone())))
}

fn add<B: FlatTensors>(loss: &FloatTensor<B>, sink: &Sink) {
    let Sink(runtime) = sink;
    if let Err(reason) = B::add_loss(loss, &mut lock(&runtime.progress.loss)) {
        runtime.fail(ShardError::Gradient { name: "the loss".to_owned(), reason });
    }
}

impl LossOps for Flex {
    fn add_loss(loss: FloatTensor<Self>, sink: Sink) -> FloatTensor<Self> {
        add::<Self>(&loss, &sink);
        loss
    }
}

#[cfg(feature = "cube")]
impl LossOps for Cube {
    fn add_loss(loss: FloatTensor<Self>, sink: Sink) -> FloatTensor<Self> {
        add::<Self>(&loss, &sink);
        loss
    }
}

#[derive(Debug)]
struct LossBackward;

impl<B: FlatTensors> Backward<B, 1> for LossBackward {
    type State = Sink;

    fn backward(self, ops: Ops<Sink, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let [Some(parent)] = ops.parents else { return };
        let Sink(runtime) = ops.state;
        begin_backward(&runtime);
        grads.register::<B>(parent.id, B::scaled(gradient, &runtime));
    }
}

impl<B: FlatTensors, C: CheckpointStrategy> LossOps for Autodiff<B, C> {
    fn add_loss(loss: FloatTensor<Self>, sink: Sink) -> FloatTensor<Self> {
        add::<B>(loss.primitive(), &sink);
        let out = loss.primitive().clone();
        match Backward::<B, 1>::prepare::<C>(LossBackward, [loss.node()]).compute_bound().stateful()
        {
            OpsKind::Tracked(prepared) => prepared.finish(sink, out),
            OpsKind::UnTracked(prepared) => prepared.finish(out),
        }
    }
}
