//! Sums with the residual stream.

use burn::backend::Flex;
use burn::tensor::DType;
use burn_backend::ops::FloatTensorOps;
use burn_flex::FlexTensor;

use super::real::Real;
use super::{BLOCK, Values, for_each_block, owned};
use crate::ops::residual::ResidualKernels;

impl ResidualKernels for Flex {
    fn residual_forward(x: FlexTensor, y: FlexTensor) -> FlexTensor {
        match (x.dtype(), y.dtype()) {
            (DType::F32, DType::F32) => sum::<f32>(&x, y),
            (DType::F64, DType::F64) => sum::<f64>(&x, y),
            // Half precision is not computed in `f32` here: one addition is rounded once either way.
            _ => Flex::float_add(x, y),
        }
    }
}

fn sum<T: Real>(x: &FlexTensor, y: FlexTensor) -> FlexTensor {
    let mut y = owned::<T>(y);
    let x = Values::<T>::of(x);
    let x: &[T] = &x;
    let values = T::storage_mut(&mut y).expect("`owned` gives tensors of this dtype");
    for_each_block(
        values,
        BLOCK,
        #[inline(always)]
        |start, block| {
            for (y, &x) in block.iter_mut().zip(&x[start..]) {
                *y += x;
            }
        },
    );
    y
}
