//! The kernels of linear maps.

use std::any::Any;

use burn::backend::Flex;
use burn::tensor::DType;
use burn_flex::FlexTensor;

use super::bf16::bf16_gemm_for;
use super::dispatch::{with_products, with_real};
use super::matrix::{Matrix, MatrixMut};
use super::parallel::for_each_block;
use super::products::{Multiplier, Output, Products, Threads};
use super::scalar::{Real, Scalar};
use super::values::{MatrixValues, Values, in_float, owned, tensor_of};
use crate::ops::linear::{LinearKernels, rows_of, with_width};
use crate::ops::shared::Prepared;

impl LinearKernels for Flex {
    fn linear_forward(x: &FlexTensor, weight: &FlexTensor, bias: Option<&FlexTensor>) -> FlexTensor {
        let [rows, d_in] = rows_of(x);
        let [weight_in, d_out] = rows_of(weight);
        assert_eq!(d_in, weight_in, "linear: rows of {d_in} values and a weight for {weight_in}");
        with_products!(bf16_gemm_for([x, weight]), x.dtype(), products, S => {
            let (x_values, weight_values) = (Values::<S>::of(x), MatrixValues::<S>::of(weight));
            let lhs = products.left(Matrix::rows(&x_values, [rows, d_in]), Threads::Pool);
            let rhs = products.right(weight_values.view(), Threads::Pool);
            let y = match bias {
                None => products.product(&lhs, &rhs, [rows, d_in, d_out]),
                Some(bias) => {
                    let bias = Values::<S>::of(bias);
                    assert_eq!(bias.len(), d_out, "linear: the length of the bias");
                    let mut y: Vec<S> = bias.repeat(rows);
                    let out = MatrixMut::rows(&mut y, [rows, d_out]);
                    products.multiply(out, Output::Add, &lhs, &rhs, [0..d_in, 0..d_out], Threads::Pool);
                    y
                }
            };
            tensor_of(y, with_width(x.layout().shape().clone(), d_out), x.dtype())
        })
    }

    fn linear_x_gradient(
        dy: &FlexTensor,
        weight: &FlexTensor,
        sum: Option<FlexTensor>,
        dtype: DType,
    ) -> FlexTensor {
        let [rows, d_out] = rows_of(dy);
        let [d_in, _] = rows_of(weight);
        let bf16_gemm = bf16_gemm_for([dy, weight]).filter(|_| dtype == DType::BF16);
        with_products!(bf16_gemm, dtype, products, S => {
            let (dy_values, weight) = (Values::<S>::of(dy), MatrixValues::<S>::of(weight));
            let lhs = products.left(Matrix::rows(&dy_values, [rows, d_out]), Threads::Pool);
            let rhs = products.right(weight.view().t(), Threads::Pool);
            match sum {
                None => {
                    let dx: Vec<S> = products.product(&lhs, &rhs, [rows, d_out, d_in]);
                    tensor_of(dx, with_width(dy.layout().shape().clone(), d_in), dtype)
                }
                Some(sum) => {
                    let mut sum = owned::<S>(sum);
                    let out = MatrixMut::rows(sum.storage_mut::<S>(), [rows, d_in]);
                    products.multiply(out, Output::Add, &lhs, &rhs, [0..d_out, 0..d_in], Threads::Pool);
                    in_float(sum, dtype)
                }
            }
        })
    }

    fn linear_weight_gradient(
        x: &FlexTensor,
        dy: &FlexTensor,
        prepared: &mut Prepared,
        dtype: DType,
    ) -> FlexTensor {
        let bf16_gemm = bf16_gemm_for([x, dy]).filter(|_| dtype == DType::BF16);
        with_products!(bf16_gemm, dtype, products, S => {
            let dw: Vec<S> = weight_gradient(products, x, dy, prepared);
            tensor_of(dw, [rows_of(x)[1], rows_of(dy)[1]], dtype)
        })
    }

    fn linear_bias_gradient(dy: &FlexTensor, dtype: DType) -> FlexTensor {
        let [_, d_out] = rows_of(dy);
        with_real!(dtype, T => {
            let dy = Values::<T>::of(dy);
            let dy: &[T] = &dy;
            let mut db = vec![T::ZERO; d_out];
            // Blocks of columns: one thread runs each sum over the rows in order.
            for_each_block(&mut db, 256, #[inline(always)] |first, block| {
                for row in dy.chunks_exact(d_out.max(1)) {
                    for (sum, &value) in block.iter_mut().zip(&row[first..]) {
                        *sum += value;
                    }
                }
            });
            tensor_of(db, [d_out], dtype)
        })
    }
}

/// Computes `xᵀ · dy`, with the copy of `xᵀ` from `prepared`, or stores one there if worthwhile.
fn weight_gradient<S: Scalar, P: Products<S, S>>(
    products: P,
    x: &FlexTensor,
    dy: &FlexTensor,
    prepared: &mut Prepared,
) -> Vec<S>
where
    P::Left<'static>: Send + 'static,
{
    let ([rows, d_out], [_, d_in]) = (rows_of(dy), rows_of(x));
    let (x, dy) = (Values::<S>::of(x), Values::<S>::of(dy));
    let (x, shape) = (Matrix::rows(&x, [rows, d_in]).t(), [d_in, rows, d_out]);
    let rhs = products.right(Matrix::rows(&dy, [rows, d_out]), Threads::Pool);
    if prepared.is_none() {
        *prepared = products.copied_left(x, d_out).map(|copy| Box::new(copy) as Box<dyn Any + Send>);
    }
    // Copied above, or by another map that reads the same `x`.
    match prepared.as_ref().and_then(|copy| copy.downcast_ref::<P::Left<'static>>()) {
        Some(copy) => products.product(copy, &rhs, shape),
        None => products.product(&products.left(x, Threads::Pool), &rhs, shape),
    }
}
