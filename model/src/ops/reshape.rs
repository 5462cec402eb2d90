//! Other shapes of a result that backward saves.

use burn::backend::autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn::backend::{Backend, Dispatch, Flex, backend_extension, tensor::FloatTensor};
use burn::tensor::{Shape, Tensor};
use burn_backend::TensorMetadata;
use burn_backend::ops::FloatTensorOps;

use super::tape::{Tracked, record};

/// Returns `x` in another shape, for results that are not computed again in backward. burn's own reshape counts as
/// cheap to repeat: under selective recomputation it would keep `x` until backward, even if nothing reads it there.
pub fn reshape<const D: usize, const E: usize>(x: Tensor<D>, shape: [usize; E]) -> Tensor<E> {
    Tensor::from_dispatch(Dispatch::saved_reshape(x.into_dispatch(), Shape::from(shape)))
}

/// A backend that can compute [`reshape`].
#[backend_extension(Flex, Cube: cfg(feature = "cube"), Autodiff)]
pub trait ReshapeOp: Backend {
    /// Returns `x` in this shape.
    fn saved_reshape(x: FloatTensor<Self>, shape: Shape) -> FloatTensor<Self>;
}

impl ReshapeOp for Flex {
    fn saved_reshape(x: FloatTensor<Self>, shape: Shape) -> FloatTensor<Self> {
        Self::float_reshape(x, shape)
    }
}

#[cfg(feature = "cube")]
impl ReshapeOp for burn_cubecl::CubeBackend {
    fn saved_reshape(x: FloatTensor<Self>, shape: Shape) -> FloatTensor<Self> {
        Self::float_reshape(x, shape)
    }
}

impl<B: ReshapeOp, C: CheckpointStrategy> ReshapeOp for Autodiff<B, C> {
    fn saved_reshape(x: Tracked<B, C>, shape: Shape) -> Tracked<B, C> {
        let before = x.shape();
        let (x, node) = x.into_parts();
        record::<B, C, _, _>(
            [node],
            B::saved_reshape(x, shape),
            |_| before,
            |mut step, dy, before| step.register::<B>(0, B::saved_reshape(dy, before)),
        )
    }
}
