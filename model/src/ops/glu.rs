//! The gates of gated feed-forward layers (Shazeer, 2020, "GLU Variants Improve Transformer").

use burn::backend::autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn::backend::{Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;
use burn::tensor::activation::{gelu, silu};

use super::plain::{FusedOp, in_f32, is_plain};
use super::tape::{Tracked, record_again};

/// The activation function of a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// `g · σ(g)`.
    Silu,
    /// `g · Φ(g)`, where `Φ(g) = (1 + erf(g / √2)) / 2` is the cumulative distribution function of the normal
    /// distribution.
    Gelu,
}

/// Computes `silu(gate) · up` for tensors of equal shape, with `silu(g) = g · σ(g)`.
///
/// Backward, with `s = σ(gate)`: `dup = dy · gate · s`, `dgate = dy · up · s · (1 + gate · (1 − s))`.
pub fn swiglu<const D: usize>(gate: Tensor<D>, up: Tensor<D>) -> Tensor<D> {
    if is_plain(FusedOp::Swiglu) {
        return in_f32([gate, up], |[gate, up]| swiglu_reference(gate, up));
    }
    fused(gate, up, Activation::Silu)
}

/// Computes [`swiglu`] in plain burn.
pub fn swiglu_reference<const D: usize>(gate: Tensor<D>, up: Tensor<D>) -> Tensor<D> {
    silu(gate) * up
}

/// Computes `gelu(gate) · up` for tensors of equal shape, with the exact `gelu(g) = g · Φ(g)` (Hendrycks and
/// Gimpel, 2016).
///
/// Backward, with the density `φ` of `Φ`: `dup = dy · gate · Φ(gate)`, `dgate = dy · up · (Φ(gate) + gate ·
/// φ(gate))`.
pub fn geglu<const D: usize>(gate: Tensor<D>, up: Tensor<D>) -> Tensor<D> {
    if is_plain(FusedOp::Geglu) {
        return in_f32([gate, up], |[gate, up]| geglu_reference(gate, up));
    }
    fused(gate, up, Activation::Gelu)
}

/// Computes [`geglu`] in plain burn.
pub fn geglu_reference<const D: usize>(gate: Tensor<D>, up: Tensor<D>) -> Tensor<D> {
    gelu(gate) * up
}

fn fused<const D: usize>(gate: Tensor<D>, up: Tensor<D>, activation: Activation) -> Tensor<D> {
    Tensor::from_dispatch(Dispatch::fused_glu(gate.into_dispatch(), up.into_dispatch(), activation))
}

/// A backend that can compute [`swiglu`] and [`geglu`].
#[backend_extension(Flex, Cube: cfg(feature = "cube"), Autodiff)]
pub trait GluOp: Backend {
    /// Computes `activation(gate) · up`.
    fn fused_glu(gate: FloatTensor<Self>, up: FloatTensor<Self>, activation: Activation)
    -> FloatTensor<Self>;
}

/// The kernels that a backend implements for [`swiglu`] and [`geglu`].
pub trait GluKernels: Backend {
    /// Returns the result.
    fn glu_forward(
        gate: &FloatTensor<Self>,
        up: &FloatTensor<Self>,
        activation: Activation,
    ) -> FloatTensor<Self>;
    /// Returns the requested gradients of `gate` and `up`.
    fn glu_backward(
        gate: &FloatTensor<Self>,
        up: &FloatTensor<Self>,
        dy: &FloatTensor<Self>,
        activation: Activation,
        wanted: [bool; 2],
    ) -> [Option<FloatTensor<Self>>; 2];
}

impl<B: GluKernels> GluOp for B {
    fn fused_glu(gate: FloatTensor<B>, up: FloatTensor<B>, activation: Activation) -> FloatTensor<B> {
        B::glu_forward(&gate, &up, activation)
    }
}

impl<B: GluKernels, C: CheckpointStrategy> GluOp for Autodiff<B, C> {
    fn fused_glu(gate: Tracked<B, C>, up: Tracked<B, C>, activation: Activation) -> Tracked<B, C> {
        let y = B::glu_forward(gate.primitive(), up.primitive(), activation);
        record_again::<B, C, _, _>(
            [&gate, &up],
            y,
            move |[gate, up]| B::glu_forward(&gate, &up, activation),
            |save| ([&gate, &up].map(save), activation),
            |mut step, dy, (saved, activation)| {
                let [gate, up] = saved.map(|id| step.value::<B>(id));
                let gradients = B::glu_backward(&gate, &up, &dy, activation, step.wanted());
                step.register_all::<B>(gradients);
            },
        )
    }
}
