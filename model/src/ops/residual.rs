//! The sum of the residual stream and a layer's result.

use burn::backend::autodiff::ops::NodeGuard;
use burn::backend::autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn::backend::{Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;

use super::plain::{FusedOp, is_plain};
use super::rms_norm::{RmsNormKernels, record_norm, rms_norm_of_shared};
use super::shared::SharedInput;
use super::tape::{Tracked, record};

/// A residual stream that a layer reads and adds to: `x + layer(rms_norm(x))`.
///
/// In backward, the kernel that computes the gradient through the normalisation also adds the gradient of the stream,
/// which saves a pass over the two gradients.
#[derive(Debug)]
pub struct Residual<const D: usize> {
    x: Tensor<D>,
    shared: SharedInput,
}

impl<const D: usize> Residual<D> {
    /// Wraps the stream before the layer, `[.., d]`.
    pub fn new(x: Tensor<D>) -> Self {
        Residual { x, shared: SharedInput::new(2) }
    }

    /// Returns the [`rms_norm`](super::rms_norm()) of the stream, for the layer to read.
    pub fn rms_norm(&self, weight: Tensor<1>, eps: f64) -> Tensor<D> {
        rms_norm_of_shared(self.x.clone(), weight, eps, self.shared.clone())
    }

    /// Returns the stream after the layer: the sum of the stream and the layer's result `y`, which has the same shape
    /// and dtype.
    pub fn add_result(self, y: Tensor<D>) -> Tensor<D> {
        self.check(&y);
        if is_plain(FusedOp::Residual) {
            return self.x + y;
        }
        let (x, y) = (self.x.into_dispatch(), y.into_dispatch());
        Tensor::from_dispatch(Dispatch::fused_residual(x, y, self.shared))
    }

    /// Returns the stream of [`Residual::add_result`], and its [`Residual::rms_norm`] for the next layer to read. The
    /// bits are those of two separate calls; on a GPU, one kernel computes both.
    pub fn add_result_and_norm(self, y: Tensor<D>, weight: Tensor<1>, eps: f64) -> (Self, Tensor<D>) {
        self.check(&y);
        if is_plain(FusedOp::Residual) || is_plain(FusedOp::RmsNorm) {
            let stream = Residual::new(self.add_result(y));
            let normed = stream.rms_norm(weight, eps);
            return (stream, normed);
        }
        let (x, y, weight) = (self.x.into_dispatch(), y.into_dispatch(), weight.into_dispatch());
        let next = SharedInput::new(2);
        let (sum, normed) = Dispatch::fused_residual_norm(x, y, weight, eps, [self.shared, next.clone()]);
        (Residual { x: Tensor::from_dispatch(sum), shared: next }, Tensor::from_dispatch(normed))
    }

    fn check(&self, y: &Tensor<D>) {
        assert_eq!(self.x.shape(), y.shape(), "residual: shapes of the stream and of what is added");
        assert_eq!(self.x.dtype(), y.dtype(), "residual: dtypes of the stream and of what is added");
    }
}

/// A backend that can compute the sums of [`Residual`].
#[backend_extension(Flex, Cube: cfg(feature = "cube"), Autodiff)]
pub trait ResidualOp: Backend {
    /// Computes `x + y`; on the CPU in the memory of `y`, if nothing else holds `y`. `shared` is the state that the
    /// readers of `x` share.
    fn fused_residual(x: FloatTensor<Self>, y: FloatTensor<Self>, shared: SharedInput) -> FloatTensor<Self>;
    /// Computes `x + y` as in [`ResidualOp::fused_residual`], and that sum normalised over its last dimension, times
    /// `weight`. `shared` has the state that the readers of `x` share, and the state that the readers of the sum
    /// share.
    fn fused_residual_norm(
        x: FloatTensor<Self>,
        y: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        eps: f64,
        shared: [SharedInput; 2],
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}

impl<B: ResidualOp + RmsNormKernels, C: CheckpointStrategy> ResidualOp for Autodiff<B, C> {
    fn fused_residual(x: Tracked<B, C>, y: Tracked<B, C>, shared: SharedInput) -> Tracked<B, C> {
        let ((x, x_node), (y, y_node)) = (x.into_parts(), y.into_parts());
        let sum = B::fused_residual(x, y, shared.clone());
        record_sum::<B, C>([x_node, y_node], sum, shared)
    }

    /// Records two operations on the tape, as separate calls would.
    fn fused_residual_norm(
        x: Tracked<B, C>,
        y: Tracked<B, C>,
        weight: Tracked<B, C>,
        eps: f64,
        shared: [SharedInput; 2],
    ) -> (Tracked<B, C>, Tracked<B, C>) {
        let ((x, x_node), (y, y_node)) = (x.into_parts(), y.into_parts());
        let (sum, normed) = B::fused_residual_norm(x, y, weight.primitive().clone(), eps, shared.clone());
        let [before, after] = shared;
        let sum = record_sum::<B, C>([x_node, y_node], sum, before);
        let normed = record_norm::<B, C>(&sum, &weight, normed, eps, after);
        (sum, normed)
    }
}

/// Puts the sum of a stream and of a layer's result on the tape.
fn record_sum<B: Backend, C: CheckpointStrategy>(
    parents: [NodeGuard; 2],
    sum: FloatTensor<B>,
    shared: SharedInput,
) -> Tracked<B, C> {
    record::<B, C, _, _>(
        parents,
        sum,
        |_| shared,
        |mut step, dy, shared| {
            step.register::<B>(1, dy.clone());
            step.register::<B>(0, dy);
            if let [true, _] = step.wanted() {
                shared.enter(|state| state.has_gradient = true);
            }
        },
    )
}
