//! The kernel of dropout.

use burn::backend::Flex;
use burn_flex::FlexTensor;

use super::dispatch::with_real;
use super::parallel::{BLOCK, for_each_block};
use super::scalar::Real;
use super::values::{Values, tensor_of};
use crate::ops::dropout::{DropoutMask, DropoutOp};

impl DropoutOp for Flex {
    fn fused_dropout(x: &FlexTensor, mask: DropoutMask) -> FlexTensor {
        let shape = x.layout().shape().clone();
        with_real!(x.dtype(), T => {
            let (values, scale) = (Values::<T>::of(x), T::from_f64(mask.scale));
            let values: &[T] = &values;
            let mut y = vec![T::ZERO; values.len()];
            for_each_block(&mut y, BLOCK, #[inline(always)] |start, block| {
                for (i, (y, &x)) in block.iter_mut().zip(&values[start..]).enumerate() {
                    *y = if mask.keeps((start + i) as u64) { x * scale } else { T::ZERO };
                }
            });
            tensor_of(y, shape, x.dtype())
        })
    }
}
