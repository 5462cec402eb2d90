//! Selection of the largest values of each row.

use burn::backend::autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn::backend::{
    Backend, Dispatch, backend_extension,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{Int, Tensor};

use super::tape::Tracked;

/// Returns the indices of the `k` largest values of each row of `scores` `[rows, width]`, the largest first:
/// `[rows, k]`. Among equal values, the lower index comes first. Indices have no gradient.
///
/// # Panics
///
/// If `k` is greater than `width`.
pub fn top_k(scores: Tensor<2>, k: usize) -> Tensor<2, Int> {
    let [_, width] = scores.dims();
    assert!(k <= width, "top_k: {k} of {width} values");
    Tensor::from_dispatch(Dispatch::fused_top_k(scores.into_dispatch(), k))
}

/// Computes [`top_k`] in plain burn.
pub fn top_k_reference(scores: Tensor<2>, k: usize) -> Tensor<2, Int> {
    scores.argsort_descending(1).narrow(1, 0, k)
}

/// A backend that can compute [`top_k`].
#[backend_extension(Flex, Cube: cfg(feature = "cube"), Autodiff)]
pub trait TopKOp: Backend {
    /// Returns the indices of the `k` largest values of each row.
    fn fused_top_k(scores: FloatTensor<Self>, k: usize) -> IntTensor<Self>;
}

impl<B: TopKOp, C: CheckpointStrategy> TopKOp for Autodiff<B, C> {
    fn fused_top_k(scores: Tracked<B, C>, k: usize) -> IntTensor<B> {
        B::fused_top_k(scores.into_primitive(), k)
    }
}
