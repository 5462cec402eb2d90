//! The squared ReLU (So et al., 2021, "Primer: Searching for Efficient Transformers for Language Modeling").

use burn::backend::autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn::backend::{Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;
use burn::tensor::activation::relu;

use super::plain::{FusedOp, in_f32, is_plain};
use super::tape::{Tracked, record_again};

/// Computes `relu(x)²`. Backward: `dx = dy · 2 · relu(x)`.
pub fn squared_relu<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    if is_plain(FusedOp::SquaredRelu) {
        return in_f32([x], |[x]| squared_relu_reference(x));
    }
    Tensor::from_dispatch(Dispatch::fused_squared_relu(x.into_dispatch()))
}

/// Computes [`squared_relu`] in plain burn.
pub fn squared_relu_reference<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let x = relu(x);
    x.clone() * x
}

/// A backend that can compute [`squared_relu`].
#[backend_extension(Flex, Cube: cfg(feature = "cube"), Autodiff)]
pub trait SquaredReluOp: Backend {
    /// Computes `relu(x)²`.
    fn fused_squared_relu(x: FloatTensor<Self>) -> FloatTensor<Self>;
}

/// The kernels that a backend implements for [`squared_relu`].
pub trait SquaredReluKernels: Backend {
    /// Returns the result.
    fn squared_relu_forward(x: &FloatTensor<Self>) -> FloatTensor<Self>;
    /// Returns the gradient of `x`.
    fn squared_relu_backward(x: &FloatTensor<Self>, dy: &FloatTensor<Self>) -> FloatTensor<Self>;
}

impl<B: SquaredReluKernels> SquaredReluOp for B {
    fn fused_squared_relu(x: FloatTensor<B>) -> FloatTensor<B> {
        B::squared_relu_forward(&x)
    }
}

impl<B: SquaredReluKernels, C: CheckpointStrategy> SquaredReluOp for Autodiff<B, C> {
    fn fused_squared_relu(x: Tracked<B, C>) -> Tracked<B, C> {
        record_again::<B, C, _, _>(
            [&x],
            B::squared_relu_forward(x.primitive()),
            |[x]| B::squared_relu_forward(&x),
            |save| save(&x),
            |mut step, dy, saved| {
                let x = step.value::<B>(saved);
                step.register::<B>(0, B::squared_relu_backward(&x, &dy));
            },
        )
    }
}
