//! The kernels of the squared ReLU.

use burn::backend::Flex;
use burn_flex::FlexTensor;

use super::dispatch::with_scalar;
use super::parallel::BLOCK;
use super::scalar::{Real, Scalar};
use super::uninit::written;
use super::values::{Values, new_tensor};
use crate::ops::squared_relu::SquaredReluKernels;

impl SquaredReluKernels for Flex {
    fn squared_relu_forward(x: &FlexTensor) -> FlexTensor {
        with_scalar!(x.dtype(), S => {
            let values = Values::<S>::of(x);
            let values: &[S] = &values;
            // SAFETY: the operand is as long as the result, so the loop writes every element.
            let y = unsafe { written(values.len(), BLOCK, #[inline(always)] |start, block| {
                for (y, &x) in block.iter_mut().zip(&values[start..]) {
                    let x = relu(x.real());
                    y.write(S::nearest(x * x));
                }
            }) };
            new_tensor(y, x.layout().shape().clone())
        })
    }

    fn squared_relu_backward(x: &FlexTensor, dy: &FlexTensor) -> FlexTensor {
        with_scalar!(x.dtype(), S => {
            let (values, dy) = (Values::<S>::of(x), Values::<S>::of(dy));
            let (values, dy): (&[S], &[S]) = (&values, &dy);
            // SAFETY: as above; the gradient of the result is as long as the operand.
            let dx = unsafe { written(values.len(), BLOCK, #[inline(always)] |start, block| {
                for ((dx, &x), &dy) in block.iter_mut().zip(&values[start..]).zip(&dy[start..]) {
                    let slope = relu(x.real());
                    dx.write(S::nearest(dy.real() * (slope + slope)));
                }
            }) };
            new_tensor(dx, x.layout().shape().clone())
        })
    }
}

#[inline(always)]
fn relu<T: Real>(x: T) -> T {
    if x < T::ZERO { T::ZERO } else { x }
}
