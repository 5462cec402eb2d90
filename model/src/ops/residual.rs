//! The residual stream around a layer.

use burn::backend::autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn::backend::{Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;

use super::plain::{FusedOp, is_plain};
use super::rms_norm::rms_norm_of_shared;
use super::shared::SharedInput;
use super::tape::{Tracked, record};

/// A residual stream that a layer reads and adds to: `x + layer(rms_norm(x))`.
///
/// In backward, the kernel that computes the gradient through the normalisation adds the gradient of the
/// stream to it, instead of another pass over both.
#[derive(Debug)]
pub struct Residual<const D: usize> {
    x: Tensor<D>,
    shared: SharedInput,
}

impl<const D: usize> Residual<D> {
    /// The stream before the layer, `[.., d]`.
    pub fn new(x: Tensor<D>) -> Self {
        Residual { x, shared: SharedInput::new(2) }
    }

    /// [`rms_norm`](super::rms_norm()) of the stream, for the layer to read.
    pub fn rms_norm(&self, weight: Tensor<1>, eps: f64) -> Tensor<D> {
        rms_norm_of_shared(self.x.clone(), weight, eps, self.shared.clone())
    }

    /// The stream after the layer: the sum with its result `y`, which has the same shape and dtype.
    pub fn add_result(self, y: Tensor<D>) -> Tensor<D> {
        assert_eq!(self.x.shape(), y.shape(), "residual: shapes of the stream and of what is added");
        if is_plain(FusedOp::Residual) {
            return self.x + y;
        }
        let (x, y) = (self.x.into_dispatch(), y.into_dispatch());
        Tensor::from_dispatch(Dispatch::fused_residual(x, y, self.shared))
    }
}

/// The backends of [`Residual`].
#[backend_extension(Flex, Cube: cfg(feature = "cube"), Autodiff)]
pub trait ResidualOp: Backend {
    /// `x + y`, in the memory of `y` where nobody else holds it. `shared` is the state of what reads `x`.
    fn fused_residual(x: FloatTensor<Self>, y: FloatTensor<Self>, shared: SharedInput) -> FloatTensor<Self>;
}

impl<B: ResidualOp, C: CheckpointStrategy> ResidualOp for Autodiff<B, C> {
    fn fused_residual(x: Tracked<B, C>, y: Tracked<B, C>, shared: SharedInput) -> Tracked<B, C> {
        let ((x, x_node), (y, y_node)) = (x.into_parts(), y.into_parts());
        record::<B, C, _, _>(
            [x_node, y_node],
            B::fused_residual(x, y, shared.clone()),
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
}
