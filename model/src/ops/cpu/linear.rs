//! The kernels of linear maps.

use burn::backend::Flex;
use burn::tensor::{DType, Shape, bf16};
use burn_flex::FlexTensor;

use super::bf16::{Left, bf16_gemm_for};
use super::dispatch::with_real;
use super::gemm::{Output, Threads, gemm, product, worth_a_copy};
use super::matrix::{Matrix, MatrixMut};
use super::parallel::for_each_block;
use super::scalar::{Real, Scalar};
use super::transpose::row_major;
use super::values::{MatrixValues, Values, in_float, owned, tensor_of};
use crate::ops::linear::{LinearKernels, rows_of};
use crate::ops::shared::Prepared;

impl LinearKernels for Flex {
    fn linear_forward(x: &FlexTensor, weight: &FlexTensor, bias: Option<&FlexTensor>) -> FlexTensor {
        let [rows, d_in] = rows_of(x);
        let [weight_in, d_out] = rows_of(weight);
        assert_eq!(d_in, weight_in, "linear: rows of {d_in} values and a weight for {weight_in}");
        let mut shape = x.layout().shape().clone();
        let last = shape.num_dims() - 1;
        shape[last] = d_out;
        if let Some(bf16_gemm) = bf16_gemm_for([x, weight]) {
            let (x, weight) = (Values::<bf16>::of(x), MatrixValues::<bf16>::of(weight));
            let (lhs, rhs) = (
                bf16_gemm.left(Matrix::rows(&x, [rows, d_in]), Threads::Pool),
                bf16_gemm.right(weight.view(), Threads::Pool),
            );
            let y = match bias {
                None => bf16_gemm.product(&lhs, &rhs),
                Some(bias) => {
                    let mut y = repeated::<bf16>(bias, [rows, d_out]);
                    let out = MatrixMut::rows(&mut y, [rows, d_out]);
                    bf16_gemm.multiply(out, Output::Add, &lhs, rhs.all(), Threads::Pool);
                    y
                }
            };
            return bf16::tensor(y, shape);
        }
        with_real!(x.dtype(), T => {
            let (x_values, weight_values) = (Values::<T>::of(x), MatrixValues::<T>::of(weight));
            let (lhs, rhs) = (Matrix::rows(&x_values, [rows, d_in]), weight_values.view());
            let y = match bias {
                None => product(lhs, rhs),
                Some(bias) => {
                    let mut y = repeated::<T>(bias, [rows, d_out]);
                    let out = MatrixMut::rows(&mut y, [rows, d_out]);
                    gemm(out, Output::Add, T::ONE, lhs, rhs, Threads::Pool);
                    y
                }
            };
            tensor_of(y, shape, x.dtype())
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
        let mut shape = dy.layout().shape().clone();
        let last = shape.num_dims() - 1;
        shape[last] = d_in;
        if let Some(bf16_gemm) = bf16_gemm_for([dy, weight]).filter(|_| dtype == DType::BF16) {
            let (dy, weight) = (Values::<bf16>::of(dy), MatrixValues::<bf16>::of(weight));
            let lhs = bf16_gemm.left(Matrix::rows(&dy, [rows, d_out]), Threads::Pool);
            let rhs = bf16_gemm.right(weight.view().t(), Threads::Pool);
            return match sum {
                None => bf16::tensor(bf16_gemm.product(&lhs, &rhs), shape),
                Some(sum) => {
                    let mut sum = owned::<bf16>(sum);
                    let values = bf16::storage_mut(&mut sum).expect("`owned` gives tensors of this dtype");
                    let out = MatrixMut::rows(values, [rows, d_in]);
                    bf16_gemm.multiply(out, Output::Add, &lhs, rhs.all(), Threads::Pool);
                    sum
                }
            };
        }
        with_real!(dtype, T => {
            let (dy, weight) = (Values::<T>::of(dy), MatrixValues::<T>::of(weight));
            let (lhs, rhs) = (Matrix::rows(&dy, [rows, d_out]), weight.view().t());
            match sum {
                None => tensor_of(product(lhs, rhs), shape, dtype),
                Some(sum) => {
                    let mut sum = owned::<T>(sum);
                    let values = T::storage_mut(&mut sum).expect("`owned` gives tensors of this dtype");
                    let out = MatrixMut::rows(values, [rows, d_in]);
                    gemm(out, Output::Add, T::ONE, lhs, rhs, Threads::Pool);
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
        let [rows, d_out] = rows_of(dy);
        let [_, d_in] = rows_of(x);
        if let Some(bf16_gemm) = bf16_gemm_for([x, dy]).filter(|_| dtype == DType::BF16) {
            let (x, dy) = (Values::<bf16>::of(x), Values::<bf16>::of(dy));
            let made = prepared.take().and_then(|made| made.downcast::<Left<'static>>().ok());
            let x = || Box::new(bf16_gemm.copied_left(Matrix::rows(&x, [rows, d_in]).t()));
            let lhs = made.unwrap_or_else(x);
            let rhs = bf16_gemm.right(Matrix::rows(&dy, [rows, d_out]), Threads::Pool);
            let dw = bf16_gemm.product(&lhs, &rhs);
            *prepared = Some(lhs);
            return bf16::tensor(dw, Shape::from([d_in, d_out]));
        }
        with_real!(dtype, T => {
            let (x, dy) = (Values::<T>::of(x), Values::<T>::of(dy));
            let (lhs, rhs) = (Matrix::rows(&x, [rows, d_in]).t(), Matrix::rows(&dy, [rows, d_out]));
            if worth_a_copy(lhs, d_out) && prepared.is_none() {
                *prepared = Some(Box::new(row_major(lhs)));
            }
            // The copy was made here, or by another map that reads the same `x`.
            let transposed = prepared.as_ref().and_then(|copy| copy.downcast_ref::<Vec<T>>());
            let lhs = transposed.map_or(lhs, |transposed| Matrix::rows(transposed, [d_in, rows]));
            let dw = product(lhs, rhs);
            tensor_of(dw, [d_in, d_out], dtype)
        })
    }

    fn linear_bias_gradient(dy: &FlexTensor, dtype: DType) -> FlexTensor {
        let [_, d_out] = rows_of(dy);
        with_real!(dtype, T => {
            let dy = Values::<T>::of(dy);
            let dy: &[T] = &dy;
            let mut db = vec![T::ZERO; d_out];
            // Blocks of columns, so that each sum runs over the rows in order on one thread.
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

/// `bias` in each of `rows` rows.
fn repeated<T: Scalar>(bias: &FlexTensor, [rows, d_out]: [usize; 2]) -> Vec<T> {
    let bias = Values::<T>::of(bias);
    let bias: &[T] = &bias;
    assert_eq!(bias.len(), d_out, "linear: the length of the bias");
    bias.repeat(rows)
}
