//! Linear maps on a GPU.

use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;

use super::matmul::{Output, matmul, product, transposed};
use super::sums::column_sums;
use super::{contiguous, contiguous_in, len_of, reshaped};
use crate::ops::linear::{LinearKernels, rows_of, with_width};
use crate::ops::shared::Prepared;

impl LinearKernels for CubeBackend {
    fn linear_forward(x: &CubeTensor, weight: &CubeTensor, bias: Option<&CubeTensor>) -> CubeTensor {
        let ([_, d_in], [weight_in, d_out]) = (rows_of(x), rows_of(weight));
        assert_eq!(d_in, weight_in, "linear: rows of {d_in} values and a weight for {weight_in}");
        let bias = bias.map(contiguous);
        let fits = bias.as_ref().is_none_or(|bias| len_of(bias) == d_out);
        assert!(fits, "linear: the length of the bias");
        let y = product(as_rows(x), weight.clone(), bias.as_ref(), 1.0, Output::New(x.dtype));
        reshaped(y, with_width(x.meta.shape().clone(), d_out))
    }

    fn linear_x_gradient(
        dy: &CubeTensor,
        weight: &CubeTensor,
        sum: Option<CubeTensor>,
        dtype: DType,
    ) -> CubeTensor {
        let [d_in, _] = rows_of(weight);
        let output = match sum {
            None => Output::New(dtype),
            Some(sum) => Output::Add(contiguous_in(&sum, dtype)),
        };
        let dx = matmul(as_rows(dy), transposed(weight), 1.0, output);
        reshaped(dx, with_width(dy.meta.shape().clone(), d_in))
    }

    /// Stores nothing in `prepared`: operands are read in place with any strides.
    fn linear_weight_gradient(
        x: &CubeTensor,
        dy: &CubeTensor,
        _prepared: &mut Prepared,
        dtype: DType,
    ) -> CubeTensor {
        matmul(transposed(&as_rows(x)), as_rows(dy), 1.0, Output::New(dtype))
    }

    fn linear_bias_gradient(dy: &CubeTensor, dtype: DType) -> CubeTensor {
        column_sums(&contiguous(dy), rows_of(dy), dtype)
    }
}

fn as_rows(x: &CubeTensor) -> CubeTensor {
    let shape = rows_of(x);
    reshaped(contiguous(x), shape)
}
