//! Sums with the residual stream.

use burn::backend::Flex;
use burn::tensor::{DType, bf16};
use burn_backend::ops::FloatTensorOps;
use burn_flex::FlexTensor;

use super::bf16::Rounded;
use super::values::{Stored, Values, owned};
use super::{BLOCK, for_each_block};
use crate::ops::residual::ResidualKernels;

impl ResidualKernels for Flex {
    fn residual_forward(x: FlexTensor, y: FlexTensor) -> FlexTensor {
        match (x.dtype(), y.dtype()) {
            (DType::F32, DType::F32) => sum(
                &x,
                y,
                #[inline(always)]
                |a: f32, b| a + b,
            ),
            (DType::F64, DType::F64) => sum(
                &x,
                y,
                #[inline(always)]
                |a: f64, b| a + b,
            ),
            (DType::BF16, DType::BF16) => sum(
                &x,
                y,
                #[inline(always)]
                |a: bf16, b: bf16| bf16::nearest(a.value() + b.value()),
            ),
            _ => Flex::float_add(x, y),
        }
    }
}

fn sum<T: Stored>(
    x: &FlexTensor,
    y: FlexTensor,
    sum_of: impl Fn(T, T) -> T + Sync + Send,
) -> FlexTensor {
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
                *y = sum_of(x, *y);
            }
        },
    );
    y
}
