//! Running a block again in backward instead of keeping its activations (Chen et al., 2016).
//!
//! Forward runs the block off the tape and keeps its input. Backward runs it again on a tape of
//! its own and starts that tape from the incoming gradient.

use std::sync::Arc;

#[cfg(feature = "cube")]
use burn::backend::Cube;
use burn::backend::autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::{
    Backend, Dispatch, DispatchKindConversion, DispatchTensor, Flex, backend_extension,
    tensor::FloatTensor,
};
use burn::tensor::Tensor;

use crate::flat::FlatTensors;

/// Which run of a block this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Run {
    /// In forward, off the tape.
    First,
    /// In backward, on a tape of its own.
    Again,
}

/// What to run: `[batch, seq, d_model]` to the same shape.
#[derive(Clone)]
pub(crate) struct Body(pub(crate) Arc<dyn Fn(Tensor<3>, Run) -> Tensor<3> + Send + Sync>);

impl std::fmt::Debug for Body {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Body")
    }
}

#[backend_extension(Flex, Cube: cfg(feature = "cube"), Autodiff)]
pub(crate) trait RecomputeOps: Backend {
    /// `body(x)`; `token` puts the node on the tape when `x` is not.
    fn recompute(x: FloatTensor<Self>, token: FloatTensor<Self>, body: Body) -> FloatTensor<Self>;
    /// A one-element tensor whose backward starts at `y` with `gradient`.
    fn seed(y: FloatTensor<Self>, gradient: FloatTensor<Self>) -> FloatTensor<Self>;
}

/// `body(x)`, keeping only `x` for backward. `token` is on the tape.
pub(crate) fn recompute(x: Tensor<3>, token: Tensor<1>, body: Body) -> Tensor<3> {
    let out = Dispatch::recompute(x.into_dispatch(), token.into_dispatch(), body);
    Tensor::from_dispatch(out)
}

/// A backend whose primitives a block can be run on.
pub(crate) trait Blocks: FlatTensors {
    fn tensor(primitive: FloatTensor<Self>) -> Tensor<3>;
    fn primitive(tensor: Tensor<3>) -> FloatTensor<Self>;
}

impl<B: FlatTensors> Blocks for B
where
    DispatchTensor: DispatchKindConversion<B>,
{
    fn tensor(primitive: FloatTensor<Self>) -> Tensor<3> {
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
    B::primitive((body.0)(B::tensor(x), Run::First))
}

impl RecomputeOps for Flex {
    fn recompute(x: FloatTensor<Self>, _token: FloatTensor<Self>, body: Body) -> FloatTensor<Self> {
        run::<Self>(x, &body)
    }

    fn seed(y: FloatTensor<Self>, _gradient: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::token(&y)
    }
}

#[cfg(feature = "cube")]
impl RecomputeOps for Cube {
    fn recompute(x: FloatTensor<Self>, _token: FloatTensor<Self>, body: Body) -> FloatTensor<Self> {
        run::<Self>(x, &body)
    }

    fn seed(y: FloatTensor<Self>, _gradient: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::token(&y)
    }
}

#[derive(Debug)]
struct RecomputeBackward;

impl<B: Blocks> Backward<B, 2> for RecomputeBackward {
    type State = (FloatTensor<B>, Body);

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let [x_parent, _token] = ops.parents;
        let (x, body) = ops.state;
        let incoming = B::tensor(grads.consume::<B>(&ops.node));
        let x = B::tensor(x).autodiff().require_grad();
        let y = (body.0)(x.clone(), Run::Again);
        let (y, incoming) = (y.into_dispatch(), incoming.into_dispatch());
        let start = <Dispatch as RecomputeOps>::seed(y, incoming);
        let mut inner = Tensor::<1>::from_dispatch(start).backward();
        if let (Some(parent), Some(gradient)) = (x_parent, x.grad_remove(&mut inner)) {
            grads.register::<B>(parent.id, B::primitive(gradient));
        }
    }
}

#[derive(Debug)]
struct SeedBackward;

impl<B: Backend> Backward<B, 1> for SeedBackward {
    type State = FloatTensor<B>;

    fn backward(
        self,
        ops: Ops<FloatTensor<B>, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let [parent] = ops.parents;
        // The ones that backward starts with; replaced by the gradient that came in.
        let _ = grads.consume::<B>(&ops.node);
        if let Some(parent) = parent {
            grads.register::<B>(parent.id, ops.state);
        }
    }
}

type Tracked<B, C> = FloatTensor<Autodiff<B, C>>;

impl<B: Blocks, C: CheckpointStrategy> RecomputeOps for Autodiff<B, C> {
    fn recompute(x: Tracked<B, C>, token: Tracked<B, C>, body: Body) -> Tracked<B, C> {
        let input = x.primitive().clone();
        let out = run::<B>(input.clone(), &body);
        let prepared = Backward::<B, 2>::prepare::<C>(RecomputeBackward, [x.node(), token.node()])
            .compute_bound()
            .stateful();
        match prepared {
            OpsKind::Tracked(prepared) => prepared.finish((input, body), out),
            OpsKind::UnTracked(prepared) => prepared.finish(out),
        }
    }

    fn seed(y: Tracked<B, C>, gradient: Tracked<B, C>) -> Tracked<B, C> {
        let start = B::token(y.primitive());
        match Backward::<B, 1>::prepare::<C>(SeedBackward, [y.node()]).compute_bound().stateful() {
            OpsKind::Tracked(prepared) => prepared.finish(gradient.into_primitive(), start),
            OpsKind::UnTracked(prepared) => prepared.finish(start),
        }
    }
}
