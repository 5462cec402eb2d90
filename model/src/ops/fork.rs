//! Lets two operations read one tensor.

use burn::backend::autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn::backend::{Backend, Dispatch, Flex, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;
use burn_backend::ops::FloatTensorOps;

use super::plain::{FusedOp, is_plain};
use super::residual::ResidualOp;
use super::shared::SharedInput;
use super::tape::{Step, Tracked, recomputes, record, record_again};

/// Returns `x` twice, for two readers in one backward pass, where the kernel of [`Residual`](super::Residual) adds
/// their gradients.
pub fn fork<const D: usize>(x: Tensor<D>) -> [Tensor<D>; 2] {
    if is_plain(FusedOp::Residual) {
        return [x.clone(), x];
    }
    let shared = SharedInput::new(2);
    [x.clone(), x].map(|x| Tensor::from_dispatch(Dispatch::fused_fork(x.into_dispatch(), shared.clone())))
}

/// A backend that can compute [`fork`].
#[backend_extension(Flex, Cube: cfg(feature = "cube"), Autodiff)]
pub trait ForkOp: Backend {
    /// Returns `x` for one of its two readers, which share the state `shared`.
    fn fused_fork(x: FloatTensor<Self>, shared: SharedInput) -> FloatTensor<Self>;
}

impl ForkOp for Flex {
    fn fused_fork(x: FloatTensor<Self>, _: SharedInput) -> FloatTensor<Self> {
        x
    }
}

#[cfg(feature = "cube")]
impl ForkOp for burn_cubecl::CubeBackend {
    fn fused_fork(x: FloatTensor<Self>, _: SharedInput) -> FloatTensor<Self> {
        x
    }
}

impl<B: ResidualOp, C: CheckpointStrategy> ForkOp for Autodiff<B, C> {
    fn fused_fork(x: Tracked<B, C>, shared: SharedInput) -> Tracked<B, C> {
        // burn itself adds up the gradient of a leaf, because it is returned to the caller.
        let is_leaf = Self::float_is_require_grad(&x);
        if recomputes::<C>() {
            let y = x.primitive().clone();
            return record_again::<B, C, _, _>([&x], y, |[x]| x, |_| (shared, is_leaf), backward::<B>);
        }
        let (x, node) = x.into_parts();
        record::<B, C, _, _>([node], x, |_| (shared, is_leaf), backward::<B>)
    }
}

/// Adds the gradient of a reader to that of the other reader, if it has arrived.
fn backward<B: ResidualOp>(
    mut step: Step<'_, 1>,
    dy: FloatTensor<B>,
    (shared, is_leaf): (SharedInput, bool),
) {
    shared.enter(|state| {
        let adds = state.has_gradient && !is_leaf;
        let other = if adds { step.take_gradient::<B>(0) } else { None };
        let dx = match other {
            Some(other) => B::fused_residual(other, dy, shared.clone()),
            None => dy,
        };
        step.register::<B>(0, dx);
        state.has_gradient = true;
    });
}
