//! The squared ReLU: one unit per vector of elements.

use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::{contiguous, cubes_for, elem, empty, len_of, vector_size};
use crate::ops::squared_relu::SquaredReluKernels;

impl SquaredReluKernels for CubeBackend {
    fn squared_relu_forward(x: &CubeTensor) -> CubeTensor {
        let x = contiguous(x);
        let y = empty(&x, x.meta.shape().clone(), x.dtype);
        let vector = vector_size(&[&x], len_of(&y));
        // SAFETY: both have the same length, and no unit goes beyond that of `y`.
        unsafe {
            launch! {
                squared_relu_kernel, cubes_for(&y.client, len_of(&y) / vector), [x], vector;
                x / vector, y / vector; elem(&x)
            }
        }
        y
    }

    fn squared_relu_backward(x: &CubeTensor, dy: &CubeTensor) -> CubeTensor {
        let (x, dy) = (contiguous(x), contiguous(dy));
        let dx = empty(&x, x.meta.shape().clone(), x.dtype);
        let vector = vector_size(&[&x, &dy], len_of(&dx));
        // SAFETY: all have the same length, and no unit goes beyond that of `dx`.
        unsafe {
            launch! {
                squared_relu_backward_kernel, cubes_for(&dx.client, len_of(&dx) / vector), [x, dy], vector;
                x / vector, dy / vector, dx / vector; [elem(&x), elem(&dy)]
            }
        }
        dx
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn squared_relu_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    y: &mut [Vector<F, N>],
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS >= y.len() {
        terminate!();
    }
    let x = relu::<N>(Vector::<f32, N>::cast_from(x[ABSOLUTE_POS]));
    y[ABSOLUTE_POS] = Vector::cast_from(x * x);
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn squared_relu_backward_kernel<F: Float, D: Float, N: Size>(
    x: &[Vector<F, N>],
    dy: &[Vector<D, N>],
    dx: &mut [Vector<F, N>],
    #[define(F, D)] _dtypes: [ElemType; 2],
) {
    if ABSOLUTE_POS >= dx.len() {
        terminate!();
    }
    let slope = relu::<N>(Vector::<f32, N>::cast_from(x[ABSOLUTE_POS]));
    let d = Vector::<f32, N>::cast_from(dy[ABSOLUTE_POS]);
    dx[ABSOLUTE_POS] = Vector::cast_from(d * (slope + slope));
}

/// Propagates NaN.
#[cube]
fn relu<N: Size>(x: Vector<f32, N>) -> Vector<f32, N> {
    let zero = Vector::<f32, N>::new(0.0f32);
    select_many(x.less_than(&zero), zero, x)
}
