//! Sums with the residual stream.

use burn_backend::ops::FloatTensorOps;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;

use crate::ops::residual::ResidualOp;
use crate::ops::shared::SharedInput;

impl ResidualOp for CubeBackend {
    fn fused_residual(x: CubeTensor, y: CubeTensor, _: SharedInput) -> CubeTensor {
        Self::float_add(x, y)
    }
}
