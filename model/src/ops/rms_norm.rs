//! Root-mean-square normalisation (Zhang and Sennrich, 2019, "Root Mean Square Layer
//! Normalization").

use burn::backend::autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn::backend::{Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;
use burn_backend::TensorMetadata;
use burn_backend::ops::FloatTensorOps;

use super::plain::{FusedOp, in_f32, is_plain};
use super::shared::SharedInput;
use super::tape::{Tracked, constant, needs_gradient, record_again};

/// Computes `y = x · r · weight` with `r = 1 / sqrt(mean(x²) + eps)` over the last dimension.
///
/// `x` is `[.., d]`, `weight` `[d]`. Backward, with `x̂ = x · r`: `dx = r · (dy · weight − x̂ · mean(dy · weight ·
/// x̂))`, `dW = Σ_rows dy · x̂`. `r` is recomputed instead of saved, which takes one pass over a row that must be
/// read anyway.
pub fn rms_norm<const D: usize>(x: Tensor<D>, weight: Tensor<1>, eps: f64) -> Tensor<D> {
    rms_norm_of_shared(x, weight, eps, SharedInput::new(1))
}

/// Minimum number of rows per cube in a GPU's backward pass, so that the partial sums of dW, one row per cube, stay
/// small compared with `x`.
const ROWS: usize = 16;
/// Maximum number of cubes in a GPU's backward pass.
const BLOCKS: usize = 2048;

/// Returns the number of rows per block that a GPU sums for the gradient of the weight.
pub(crate) fn rows_of_block(rows: usize) -> usize {
    rows.div_ceil(BLOCKS).max(ROWS)
}

/// Computes [`rms_norm`] of an input that other operations also read.
pub(super) fn rms_norm_of_shared<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<1>,
    eps: f64,
    shared: SharedInput,
) -> Tensor<D> {
    if is_plain(FusedOp::RmsNorm) {
        // A copy, because backward saves it, and a view would keep the memory of a gathered weight.
        let weight = weight.unsqueeze::<D>().mul_scalar(1.0);
        return in_f32([x, weight], |[x, weight]| rms_norm_reference(x, weight.flatten(0, D - 1), eps));
    }
    let (x, weight) = (x.into_dispatch(), weight.into_dispatch());
    Tensor::from_dispatch(Dispatch::fused_rms_norm(x, weight, eps, shared))
}

/// Computes [`rms_norm`] in plain burn.
pub fn rms_norm_reference<const D: usize>(x: Tensor<D>, weight: Tensor<1>, eps: f64) -> Tensor<D> {
    let mean_square = (x.clone() * x.clone()).mean_dim(D - 1);
    x / (mean_square + eps).sqrt() * weight.unsqueeze()
}

/// A backend that can compute [`rms_norm`].
#[backend_extension(Flex, Cube: cfg(feature = "cube"), Autodiff)]
pub trait RmsNormOp: Backend {
    /// Normalises `x` over its last dimension and multiplies it by `weight`.
    fn fused_rms_norm(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        eps: f64,
        shared: SharedInput,
    ) -> FloatTensor<Self>;
}

/// The kernels that a backend implements for [`rms_norm`].
pub trait RmsNormKernels: Backend {
    /// Returns the result.
    fn rms_norm_forward(x: &FloatTensor<Self>, weight: &FloatTensor<Self>, eps: f64) -> FloatTensor<Self>;
    /// Returns the requested gradients of `x` and `weight`. If there is a `sum`, the gradient of `x` is added to it
    /// and rounded once.
    fn rms_norm_backward(
        x: &FloatTensor<Self>,
        weight: &FloatTensor<Self>,
        dy: &FloatTensor<Self>,
        sum: Option<FloatTensor<Self>>,
        eps: f64,
        wanted: [bool; 2],
    ) -> [Option<FloatTensor<Self>>; 2];
}

impl<B: RmsNormKernels> RmsNormOp for B {
    fn fused_rms_norm(x: FloatTensor<B>, weight: FloatTensor<B>, eps: f64, _: SharedInput) -> FloatTensor<B> {
        B::rms_norm_forward(&x, &weight, eps)
    }
}

impl<B: RmsNormKernels, C: CheckpointStrategy> RmsNormOp for Autodiff<B, C> {
    fn fused_rms_norm(
        x: Tracked<B, C>,
        weight: Tracked<B, C>,
        eps: f64,
        shared: SharedInput,
    ) -> Tracked<B, C> {
        let y = B::rms_norm_forward(x.primitive(), weight.primitive(), eps);
        record_norm::<B, C>(&x, &weight, y, eps, shared)
    }
}

/// Puts `y`, the normalised `x`, on the tape.
pub(super) fn record_norm<B: RmsNormKernels, C: CheckpointStrategy>(
    x: &Tracked<B, C>,
    weight: &Tracked<B, C>,
    y: FloatTensor<B>,
    eps: f64,
    shared: SharedInput,
) -> Tracked<B, C> {
    let wanted = [x.is_tracked(), needs_gradient::<B, C>(weight)];
    if wanted == [false; 2] {
        return constant::<B, C>(y);
    }
    // burn itself adds up the gradient of a leaf, because it is returned to the caller.
    let is_leaf = Autodiff::<B, C>::float_is_require_grad(x);
    record_again::<B, C, _, _>(
        [x, weight],
        y,
        move |[x, weight]| B::rms_norm_forward(&x, &weight, eps),
        |save| ([x, weight].map(save), eps, is_leaf, wanted, shared),
        |mut step, dy, (saved, eps, is_leaf, wanted, shared)| {
            let [x, weight] = saved.map(|id| step.value::<B>(id));
            let adds = shared.enter(|state| state.has_gradient) && !is_leaf;
            let sum = if adds { step.take_gradient::<B>(0) } else { None };
            let gradients = B::rms_norm_backward(&x, &weight, &dy, sum, eps, wanted);
            step.register_all::<B>(gradients);
        },
    )
}

/// Returns the width of a row.
pub(super) fn width_of(x: &impl TensorMetadata, weight: &impl TensorMetadata) -> usize {
    let width = x.shape().iter().last().copied().unwrap_or(0);
    let [weight_width] = weight.shape().dims();
    assert_eq!(width, weight_width, "rms_norm: rows of {width} values and a weight for {weight_width}");
    assert!(width > 0, "rms_norm: rows without values");
    width
}
