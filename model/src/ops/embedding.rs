//! Lookup of rows of a table.

use burn::backend::autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn::backend::{
    Backend, Dispatch, backend_extension,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{DType, Int, Shape, Tensor};
use burn_backend::TensorMetadata;

use super::plain::{FusedOp, is_plain};
use super::tape::{Tracked, record};

/// Computes `y[b, t] = weight[ids[b, t]]`.
///
/// `weight` is `[vocab, d_model]`, `ids` `[batch, seq]`, the result `[batch, seq, d_model]`. Backward: `dW[v] = Σ
/// dy[b, t]` over the positions where `ids[b, t] = v`, in the order of the positions. Backward needs the ids and the
/// shape of the weight, but not its values.
///
/// # Panics
///
/// If an id is not a row of `weight`. On a GPU, where the check would have to wait for the device, the id's row of
/// the result is NaN instead.
pub fn embedding(weight: Tensor<2>, ids: Tensor<2, Int>) -> Tensor<3> {
    if is_plain(FusedOp::Embedding) {
        return embedding_reference(weight, ids);
    }
    Tensor::from_dispatch(Dispatch::fused_embedding(weight.into_dispatch(), ids.into_dispatch()))
}

/// Computes [`embedding`] in plain burn.
pub fn embedding_reference(weight: Tensor<2>, ids: Tensor<2, Int>) -> Tensor<3> {
    let ([_, d_model], [batch, seq]) = (weight.dims(), ids.dims());
    weight.select(0, ids.reshape([batch * seq])).reshape([batch, seq, d_model])
}

/// A backend that can compute [`embedding`].
#[backend_extension(Flex, Cube: cfg(feature = "cube"), Autodiff)]
pub trait EmbeddingOp: Backend {
    /// Returns the rows `ids` of `weight`.
    fn fused_embedding(weight: FloatTensor<Self>, ids: IntTensor<Self>) -> FloatTensor<Self>;
}

/// The kernels that a backend implements for [`embedding`].
pub trait EmbeddingKernels: Backend {
    /// Returns the result.
    fn embedding_forward(weight: &FloatTensor<Self>, ids: &IntTensor<Self>) -> FloatTensor<Self>;
    /// Returns the gradient of a weight of this shape and dtype.
    fn embedding_weight_gradient(
        ids: &IntTensor<Self>,
        dy: &FloatTensor<Self>,
        shape: Shape,
        dtype: DType,
    ) -> FloatTensor<Self>;
}

impl<B: EmbeddingKernels> EmbeddingOp for B {
    fn fused_embedding(weight: FloatTensor<B>, ids: IntTensor<B>) -> FloatTensor<B> {
        B::embedding_forward(&weight, &ids)
    }
}

impl<B: EmbeddingKernels, C: CheckpointStrategy> EmbeddingOp for Autodiff<B, C> {
    fn fused_embedding(weight: Tracked<B, C>, ids: IntTensor<B>) -> Tracked<B, C> {
        let y = B::embedding_forward(weight.primitive(), &ids);
        record::<B, C, _, _>(
            [weight.node()],
            y,
            |_| (ids, weight.shape(), weight.dtype()),
            |mut step, dy, (ids, shape, dtype)| {
                step.register::<B>(0, B::embedding_weight_gradient(&ids, &dy, shape, dtype));
            },
        )
    }
}
