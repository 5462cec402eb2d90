//! Running a block again in backward instead of keeping its activations (Chen et al., 2016).
//!
//! Forward runs the block off the tape and keeps its input. Backward runs it again on a tape of
//! its own and starts that tape from the incoming gradient.

use std::sync::Arc;

use burn::backend::autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::{Dispatch, Flex, backend_extension, tensor::FloatTensor};
use burn::tensor::{DType, Shape, Tensor};
use burn_flex::FlexTensor;

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

#[backend_extension(Flex, Autodiff)]
pub(crate) trait RecomputeOps: burn::backend::Backend {
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

fn run(x: FlexTensor, body: &Body) -> FlexTensor {
    let out = (body.0)(Tensor::from_primitive::<Flex>(x), Run::First);
    primitive(out)
}

fn primitive(x: Tensor<3>) -> FlexTensor {
    match x.try_into_primitive::<Flex>() {
        Ok(primitive) => primitive,
        Err(error) => unreachable!("invariant: a block stays on its input's device ({error:?})"),
    }
}

fn scalar() -> FlexTensor {
    FlexTensor::zeros(Shape::new([1]), DType::F32)
}

impl RecomputeOps for Flex {
    fn recompute(x: FlexTensor, _token: FlexTensor, body: Body) -> FlexTensor {
        run(x, &body)
    }

    fn seed(_y: FlexTensor, _gradient: FlexTensor) -> FlexTensor {
        scalar()
    }
}

#[derive(Debug)]
struct RecomputeBackward;

impl Backward<Flex, 2> for RecomputeBackward {
    type State = (FlexTensor, Body);

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let [x_parent, _token] = ops.parents;
        let (x, body) = ops.state;
        let incoming = Tensor::<3>::from_primitive::<Flex>(grads.consume::<Flex>(&ops.node));
        let x = Tensor::<3>::from_primitive::<Flex>(x).autodiff().require_grad();
        let y = (body.0)(x.clone(), Run::Again);
        let start = Dispatch::seed(y.into_dispatch(), incoming.into_dispatch());
        let mut inner = Tensor::<1>::from_dispatch(start).backward();
        if let (Some(parent), Some(gradient)) = (x_parent, x.grad_remove(&mut inner)) {
            grads.register::<Flex>(parent.id, primitive(gradient));
        }
    }
}

#[derive(Debug)]
struct SeedBackward;

impl Backward<Flex, 1> for SeedBackward {
    type State = FlexTensor;

    fn backward(
        self,
        ops: Ops<FlexTensor, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let [parent] = ops.parents;
        // The ones that backward starts with; replaced by the gradient that came in.
        let _ = grads.consume::<Flex>(&ops.node);
        if let Some(parent) = parent {
            grads.register::<Flex>(parent.id, ops.state);
        }
    }
}

type Tracked<C> = FloatTensor<Autodiff<Flex, C>>;

impl<C: CheckpointStrategy> RecomputeOps for Autodiff<Flex, C> {
    fn recompute(x: Tracked<C>, token: Tracked<C>, body: Body) -> Tracked<C> {
        let input = x.primitive().clone();
        let out = run(input.clone(), &body);
        let prepared =
            RecomputeBackward.prepare::<C>([x.node(), token.node()]).compute_bound().stateful();
        match prepared {
            OpsKind::Tracked(prepared) => prepared.finish((input, body), out),
            OpsKind::UnTracked(prepared) => prepared.finish(out),
        }
    }

    fn seed(y: Tracked<C>, gradient: Tracked<C>) -> Tracked<C> {
        match SeedBackward.prepare::<C>([y.node()]).compute_bound().stateful() {
            OpsKind::Tracked(prepared) => prepared.finish(gradient.into_primitive(), scalar()),
            OpsKind::UnTracked(prepared) => prepared.finish(scalar()),
        }
    }
}
