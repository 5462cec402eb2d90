//! The kernel of sums with the residual stream.

use burn::backend::Flex;
use burn_flex::FlexTensor;

use super::dispatch::with_scalar;
use super::parallel::{BLOCK, for_each_block};
use super::scalar::Scalar;
use super::values::{Values, owned};
use crate::ops::residual::ResidualOp;
use crate::ops::rms_norm::RmsNormKernels;
use crate::ops::shared::SharedInput;

impl ResidualOp for Flex {
    fn fused_residual(x: FlexTensor, y: FlexTensor, _: SharedInput) -> FlexTensor {
        with_scalar!(y.dtype(), S => sum::<S>(&x, y))
    }

    fn fused_residual_norm(
        x: FlexTensor,
        y: FlexTensor,
        weight: FlexTensor,
        eps: f64,
        [before, _]: [SharedInput; 2],
    ) -> (FlexTensor, FlexTensor) {
        let sum = Self::fused_residual(x, y, before);
        let normed = Self::rms_norm_forward(&sum, &weight, eps);
        (sum, normed)
    }
}

fn sum<S: Scalar>(x: &FlexTensor, y: FlexTensor) -> FlexTensor {
    let mut y = owned::<S>(y);
    let x = Values::<S>::of(x);
    let x: &[S] = &x;
    for_each_block(
        y.storage_mut::<S>(),
        BLOCK,
        #[inline(always)]
        |start, block| {
            for (y, &x) in block.iter_mut().zip(&x[start..]) {
                *y = S::nearest(y.real() + x.real());
            }
        },
    );
    y
}
