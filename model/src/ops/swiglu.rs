//! The gate of a SwiGLU feed-forward layer (Shazeer, 2020, "GLU Variants Improve Transformer").

use burn::backend::autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn::backend::{Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;

use super::plain::{FusedOp, in_f32, is_plain};
use super::tape::{Tracked, record};

/// `silu(gate) · up` for tensors of one shape, with `silu(g) = g · σ(g)`.
///
/// Backward, with `s = σ(gate)`: `dup = dy · gate · s`,
/// `dgate = dy · up · s · (1 + gate · (1 − s))`.
pub fn swiglu<const D: usize>(gate: Tensor<D>, up: Tensor<D>) -> Tensor<D> {
    if is_plain(FusedOp::Swiglu) {
        return in_f32([gate, up], |[gate, up]| swiglu_reference(gate, up));
    }
    Tensor::from_dispatch(Dispatch::fused_swiglu(gate.into_dispatch(), up.into_dispatch()))
}

/// [`swiglu`] in plain burn.
pub fn swiglu_reference<const D: usize>(gate: Tensor<D>, up: Tensor<D>) -> Tensor<D> {
    burn::tensor::activation::silu(gate) * up
}

/// The backends of [`swiglu`].
#[backend_extension(Flex, Cube: cfg(feature = "cube"), Autodiff)]
pub trait SwigluOp: Backend {
    /// `silu(gate) · up`.
    fn fused_swiglu(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self>;
}

/// The kernels that a backend implements for [`swiglu`].
pub trait SwigluKernels: Backend {
    /// The result.
    fn swiglu_forward(gate: &FloatTensor<Self>, up: &FloatTensor<Self>) -> FloatTensor<Self>;
    /// The gradients of `gate` and `up` that are wanted.
    fn swiglu_backward(
        gate: &FloatTensor<Self>,
        up: &FloatTensor<Self>,
        dy: &FloatTensor<Self>,
        wanted: [bool; 2],
    ) -> [Option<FloatTensor<Self>>; 2];
}

impl<B: SwigluKernels> SwigluOp for B {
    fn fused_swiglu(gate: FloatTensor<B>, up: FloatTensor<B>) -> FloatTensor<B> {
        B::swiglu_forward(&gate, &up)
    }
}

impl<B: SwigluKernels, C: CheckpointStrategy> SwigluOp for Autodiff<B, C> {
    fn fused_swiglu(gate: Tracked<B, C>, up: Tracked<B, C>) -> Tracked<B, C> {
        let y = B::swiglu_forward(gate.primitive(), up.primitive());
        record::<B, C, _, _>(
            [gate.node(), up.node()],
            y,
            |save| [&gate, &up].map(save),
            |mut step, dy, saved| {
                let [gate, up] = saved.map(|id| step.value::<B>(id));
                let gradients = B::swiglu_backward(&gate, &up, &dy, step.wanted());
                step.register_all::<B>(gradients);
            },
        )
    }
}
