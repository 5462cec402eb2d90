//! Matrix product with a weight, and its bias.

use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::matmul::{Output, matmul, transposed};
use super::sums::column_sums;
use super::{address_type, arg, cubes_for, elem, flat, len_of, reshaped, vector_size};
use crate::ops::linear::{LinearKernels, rows_of};

impl LinearKernels for CubeBackend {
    fn linear_forward(
        x: &CubeTensor,
        weight: &CubeTensor,
        bias: Option<&CubeTensor>,
    ) -> CubeTensor {
        let ([_, d_in], [weight_in, d_out]) = (rows_of(x), rows_of(weight));
        assert_eq!(d_in, weight_in, "linear: rows of {d_in} values and a weight for {weight_in}");
        let y = matmul(as_rows(x), weight.clone(), 1.0, Output::New(x.dtype));
        if let Some(bias) = bias {
            assert_eq!(len_of(bias), d_out, "linear: the length of the bias");
            add_bias(&y, &flat(bias));
        }
        with_width(y, x, d_out)
    }

    fn linear_x_gradient(dy: &CubeTensor, weight: &CubeTensor, dtype: DType) -> CubeTensor {
        let [d_in, _] = rows_of(weight);
        let dx = matmul(as_rows(dy), transposed(weight), 1.0, Output::New(dtype));
        with_width(dx, dy, d_in)
    }

    fn linear_weight_gradient(x: &CubeTensor, dy: &CubeTensor, dtype: DType) -> CubeTensor {
        matmul(transposed(&as_rows(x)), as_rows(dy), 1.0, Output::New(dtype))
    }

    fn linear_bias_gradient(dy: &CubeTensor, dtype: DType) -> CubeTensor {
        column_sums(&flat(dy), rows_of(dy), dtype)
    }
}

/// `x` as a matrix of its rows, without gaps.
fn as_rows(x: &CubeTensor) -> CubeTensor {
    let shape = rows_of(x);
    reshaped(flat(x), shape)
}

/// `rows` in the shape of `like`, but with rows of `width` elements.
fn with_width(rows: CubeTensor, like: &CubeTensor, width: usize) -> CubeTensor {
    let mut shape = like.meta.shape().clone();
    let last = shape.num_dims() - 1;
    shape[last] = width;
    reshaped(rows, shape)
}

/// Adds `bias` to each row of `y`.
fn add_bias(y: &CubeTensor, bias: &CubeTensor) {
    if len_of(y) == 0 {
        return;
    }
    let vector = vector_size(&[y, bias], len_of(bias));
    let (count, dim) = cubes_for(&y.client, len_of(y) / vector);
    // SAFETY: no unit goes beyond the end of `y`, whose rows are as long as `bias`.
    unsafe {
        add_bias_kernel::launch_unchecked(
            &y.client,
            count,
            dim,
            address_type(&[y]),
            vector,
            arg(y, vector),
            arg(bias, vector),
            [elem(y), elem(bias)],
        );
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn add_bias_kernel<F: Float, W: Float, N: Size>(
    y: &mut [Vector<F, N>],
    bias: &[Vector<W, N>],
    #[define(F, W)] _dtypes: [ElemType; 2],
) {
    if ABSOLUTE_POS < y.len() {
        let value = Vector::<f32, N>::cast_from(y[ABSOLUTE_POS]);
        let bias = Vector::<f32, N>::cast_from(bias[ABSOLUTE_POS % bias.len()]);
        y[ABSOLUTE_POS] = Vector::cast_from(value + bias);
    }
}
