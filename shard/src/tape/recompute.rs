//! Recomputing a block in backward instead of saving its activations (Chen et al., 2016).
//!
//! Forward runs the block off the tape and saves its input. Backward runs it again on a separate tape and starts that
//! tape from the incoming gradient. A loss that the block adds is a second output, whose gradient arrives before that
//! of the first.

use std::sync::{Arc, Mutex};

use burn::backend::autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops},
};
use burn::backend::{
    Backend, Dispatch, DispatchKindConversion, DispatchTensor, backend_extension, tensor::FloatTensor,
};
use burn::tensor::Tensor;

use super::boundary::at_input;
use super::node::{Tracked, on_tape};
use crate::buffers::FlatTensors;
use crate::param_group::ParamGroups;
use crate::sync::lock;

/// The pass in which a block runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Run {
    /// In forward, off the tape.
    First,
    /// In backward, on a separate tape.
    Again,
}

/// The output of a block for its input `[batch, seq, d_model]`: the same shape, and a loss `[1]` that it
/// adds.
pub(crate) type BlockOutput = (Tensor<3>, Option<Tensor<1>>);

/// The function to run. Its first run must return tensors off the tape.
#[derive(Clone)]
pub(crate) struct Body {
    run: Arc<dyn Fn(Tensor<3>, Run) -> BlockOutput + Send + Sync>,
    loss: Arc<AddedLoss>,
}

impl Body {
    pub(crate) fn new(run: impl Fn(Tensor<3>, Run) -> BlockOutput + Send + Sync + 'static) -> Self {
        Body { run: Arc::new(run), loss: Arc::default() }
    }
}

impl std::fmt::Debug for Body {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Body")
    }
}

/// The loss that a block adds: its value from the first run, and its gradient for the second.
#[derive(Default)]
pub(crate) struct AddedLoss {
    value: Mutex<Option<Tensor<1>>>,
    gradient: Mutex<Option<Tensor<1>>>,
}

impl std::fmt::Debug for AddedLoss {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("AddedLoss")
    }
}

#[backend_extension(Flex, Cube: cfg(feature = "cube"), Autodiff)]
pub(crate) trait RecomputeOps: Backend {
    /// Returns `body(x)`; `token` puts the node on the tape if `x` is not.
    fn recompute(x: FloatTensor<Self>, token: FloatTensor<Self>, body: Body) -> FloatTensor<Self>;
    /// Returns `value` as a child of `y` on the tape, whose gradient goes to `loss` and not to `y`.
    fn added_loss(y: FloatTensor<Self>, value: FloatTensor<Self>, loss: Arc<AddedLoss>) -> FloatTensor<Self>;
    /// Returns a one-element tensor from which backward continues at `y` with `gradient`.
    fn seed(y: FloatTensor<Self>, gradient: FloatTensor<Self>) -> FloatTensor<Self>;
}

/// Returns `body(x)`, and saves only `x` for backward. `token` is on the tape.
pub(crate) fn recompute(x: Tensor<3>, token: Tensor<1>, body: Body) -> BlockOutput {
    let loss = body.loss.clone();
    let y = Dispatch::recompute(x.into_dispatch(), token.into_dispatch(), body);
    let y = Tensor::from_dispatch(y);
    let value = lock(&loss.value).take();
    let added = value.map(|value| {
        // Depends on the block's output, so that backward reaches it before it runs the block again.
        let (y, value) = (y.clone().into_dispatch(), value.autodiff().into_dispatch());
        Tensor::from_dispatch(Dispatch::added_loss(y, value, loss))
    });
    (y, added)
}

/// A backend whose tensors a block can run on.
pub(crate) trait Blocks: FlatTensors {
    fn tensor<const D: usize>(primitive: FloatTensor<Self>) -> Tensor<D>;
    fn primitive(tensor: Tensor<3>) -> FloatTensor<Self>;
}

impl<B: FlatTensors> Blocks for B
where
    DispatchTensor: DispatchKindConversion<B>,
{
    fn tensor<const D: usize>(primitive: FloatTensor<Self>) -> Tensor<D> {
        Tensor::from_primitive::<B>(primitive)
    }

    fn primitive(tensor: Tensor<3>) -> FloatTensor<Self> {
        match tensor.try_into_primitive::<B>() {
            Ok(primitive) => primitive,
            Err(error) => {
                unreachable!("invariant: a block stays on its input's device ({error:?})")
            }
        }
    }
}

fn run<B: Blocks>(x: FloatTensor<B>, body: &Body) -> FloatTensor<B> {
    let (y, loss) = (body.run)(B::tensor(x), Run::First);
    *lock(&body.loss.value) = loss;
    B::primitive(y)
}

impl<B: Blocks> RecomputeOps for B {
    fn recompute(x: FloatTensor<B>, _token: FloatTensor<B>, body: Body) -> FloatTensor<B> {
        run::<B>(x, &body)
    }

    fn added_loss(_y: FloatTensor<B>, value: FloatTensor<B>, _loss: Arc<AddedLoss>) -> FloatTensor<B> {
        value
    }

    fn seed(y: FloatTensor<B>, _gradient: FloatTensor<B>) -> FloatTensor<B> {
        B::token(&y)
    }
}

#[derive(Debug)]
struct RecomputeBackward;

impl<B: Blocks> Backward<B, 2> for RecomputeBackward {
    type State = (FloatTensor<B>, Body);

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let [x_parent, _token] = ops.parents;
        let (x, body) = ops.state;
        let incoming = B::tensor::<3>(grads.consume::<B>(&ops.node));
        let x = B::tensor::<3>(x).autodiff().require_grad();
        // A block that is not recomputed reads the result of an operation, never a leaf. Operations add to
        // the gradient of a result themselves, but leave the gradient of a leaf to burn, which rounds it once
        // more. So the block must not see a leaf here either.
        let (y, loss) = (body.run)(at_input(x.clone(), ParamGroups::new()), Run::Again);
        let mut start = seed(y, incoming);
        let of_loss = lock(&body.loss.gradient).take();
        if let (Some(loss), Some(incoming)) = (loss, of_loss) {
            start = start + seed(loss, incoming);
        }
        let mut inner = start.backward();
        if let (Some(parent), Some(gradient)) = (x_parent, x.grad_remove(&mut inner)) {
            grads.register::<B>(parent.id, B::primitive(gradient));
        }
    }
}

/// Returns a one-element tensor from which backward continues at `y` with `gradient`.
fn seed<const D: usize>(y: Tensor<D>, gradient: Tensor<D>) -> Tensor<1> {
    let (y, gradient) = (y.into_dispatch(), gradient.into_dispatch());
    Tensor::from_dispatch(<Dispatch as RecomputeOps>::seed(y, gradient))
}

#[derive(Debug)]
struct AddedLossBackward;

impl<B: Blocks> Backward<B, 1> for AddedLossBackward {
    type State = Arc<AddedLoss>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        *lock(&ops.state.gradient) = Some(B::tensor(gradient));
    }
}

#[derive(Debug)]
struct SeedBackward;

impl<B: Backend> Backward<B, 1> for SeedBackward {
    type State = FloatTensor<B>;

    fn backward(self, ops: Ops<FloatTensor<B>, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let [parent] = ops.parents;
        // The gradient of one with which backward starts; replaced by the incoming gradient.
        let _ = grads.consume::<B>(&ops.node);
        if let Some(parent) = parent {
            grads.register::<B>(parent.id, ops.state);
        }
    }
}

impl<B: Blocks, C: CheckpointStrategy> RecomputeOps for Autodiff<B, C> {
    fn recompute(x: Tracked<B, C>, token: Tracked<B, C>, body: Body) -> Tracked<B, C> {
        let input = x.primitive().clone();
        let out = run::<B>(input.clone(), &body);
        on_tape::<B, C, _, _>(RecomputeBackward, [x.node(), token.node()], (input, body), out)
    }

    fn added_loss(y: Tracked<B, C>, value: Tracked<B, C>, loss: Arc<AddedLoss>) -> Tracked<B, C> {
        on_tape::<B, C, _, _>(AddedLossBackward, [y.node()], loss, value.into_primitive())
    }

    fn seed(y: Tracked<B, C>, gradient: Tracked<B, C>) -> Tracked<B, C> {
        let start = B::token(y.primitive());
        on_tape::<B, C, _, _>(SeedBackward, [y.node()], gradient.into_primitive(), start)
    }
}
