//! The kernels of root-mean-square normalisation.

use burn::backend::Flex;
use burn_flex::FlexTensor;

use super::dispatch::with_scalar;
use super::parallel::{blocks, for_each_item, rows_per_block, simd};
use super::scalar::{Real, Scalar, dot, dot3};
use super::uninit::{UninitVec, written, zeros};
use super::values::{Values, new_tensor, tensor_of};
use crate::ops::rms_norm::{RmsNormKernels, width_of};

impl RmsNormKernels for Flex {
    fn rms_norm_forward(x: &FlexTensor, weight: &FlexTensor, eps: f64) -> FlexTensor {
        let width = width_of(x, weight);
        let shape = x.layout().shape().clone();
        with_scalar!(x.dtype(), S => {
            let (x_values, weight) = (Values::<S>::of(x), Values::<S>::of(weight));
            let (x_values, weight): (&[S], &[S]) = (&x_values, &weight);
            let eps = <S as Scalar>::Real::from_f64(eps);
            let size = rows_per_block(width) * width;
            // SAFETY: `x` consists of whole rows as wide as the weight, so the loop writes every element.
            let y = unsafe { written(x_values.len(), size, #[inline(always)] |start, block| {
                let rows = x_values[start..].chunks_exact(width);
                for (y, x) in block.chunks_exact_mut(width).zip(rows) {
                    let r = inverse_rms(x, eps);
                    for ((y, &x), &w) in y.iter_mut().zip(x).zip(weight) {
                        y.write(S::nearest(x.real() * r * w.real()));
                    }
                }
            }) };
            new_tensor(y, shape)
        })
    }

    fn rms_norm_backward(
        x: &FlexTensor,
        weight: &FlexTensor,
        dy: &FlexTensor,
        sum: Option<FlexTensor>,
        eps: f64,
        wanted: [bool; 2],
    ) -> [Option<FlexTensor>; 2] {
        let width = width_of(x, weight);
        with_scalar!(x.dtype(), S => {
            let x_values = Values::<S>::of(x);
            let (weight_values, dy_values) = (Values::<S>::of(weight), Values::<S>::of(dy));
            let operands: [&[S]; 3] = [&x_values, &weight_values, &dy_values];
            let (sum, eps) = (sum.as_ref().map(Values::<S>::of), <S as Scalar>::Real::from_f64(eps));
            let (dx, dw) = gradient_values(operands, sum.as_deref(), width, eps, wanted);
            [
                dx.map(|dx| new_tensor(dx, x.layout().shape().clone())),
                dw.map(|dw| tensor_of(dw, [width], weight.dtype())),
            ]
        })
    }
}

/// Returns `1 / sqrt(mean(x²) + eps)` of one row.
#[inline(always)]
fn inverse_rms<S: Scalar>(x: &[S], eps: S::Real) -> S::Real {
    let mean_square = dot(x, x) / S::Real::from_f64(x.len() as f64);
    S::Real::ONE / (mean_square + eps).sqrt()
}

#[inline(always)]
fn dx_of<S: Scalar>(((dy, w), x): ((&S, &S), &S), r: S::Real, shift: S::Real) -> S::Real {
    r * (dy.real() * w.real() - x.real() * r * shift)
}

fn gradient_values<S: Scalar>(
    [x, weight, dy]: [&[S]; 3],
    sum: Option<&[S]>,
    width: usize,
    eps: S::Real,
    wanted: [bool; 2],
) -> (Option<Vec<S>>, Option<Vec<S::Real>>) {
    // At least 16 rows, so that the partial sums of dW stay small compared with x itself.
    let size = rows_per_block(width).max(16) * width;
    let count = x.len().div_ceil(size);
    let mut dx = wanted[0].then(|| UninitVec::new(x.len()));
    let mut partial_dw = zeros::<S::Real>(wanted[1], count * width);
    let of_x = blocks(dx.as_mut().map(UninitVec::slots), size, count);
    let of_weight = blocks(partial_dw.as_deref_mut(), width, count);
    for_each_item(of_x.into_iter().zip(of_weight), usize::MAX, |i, (mut dx, mut dw)| {
        let rows = i * size..x.len().min((i + 1) * size);
        let sum = sum.map(|sum| &sum[rows.clone()]);
        let (x, dy) = (&x[rows.clone()], &dy[rows]);
        simd(
            #[inline(always)]
            || {
                for (row, (x, dy)) in x.chunks_exact(width).zip(dy.chunks_exact(width)).enumerate() {
                    let r = inverse_rms(x, eps);
                    if let Some(dw) = &mut dw {
                        for ((dw, &x), &dy) in dw.iter_mut().zip(x).zip(dy) {
                            *dw += dy.real() * (x.real() * r);
                        }
                    }
                    if let Some(dx) = &mut dx {
                        let dx = &mut dx[row * width..][..width];
                        let shift = dot3(dy, weight, x) * r / S::Real::from_f64(width as f64);
                        let operands = dy.iter().zip(weight).zip(x);
                        match sum {
                            None => {
                                for (dx, operands) in dx.iter_mut().zip(operands) {
                                    dx.write(S::nearest(dx_of(operands, r, shift)));
                                }
                            }
                            Some(sum) => {
                                let sum = &sum[row * width..];
                                for ((dx, operands), &sum) in dx.iter_mut().zip(operands).zip(sum) {
                                    let sum = dx_of(operands, r, shift) + sum.real();
                                    dx.write(S::nearest(sum));
                                }
                            }
                        }
                    }
                }
            },
        );
    });
    let dw = partial_dw.map(|partial| {
        let mut dw = vec![S::Real::ZERO; width];
        for partial in partial.chunks_exact(width) {
            for (dw, &partial) in dw.iter_mut().zip(partial) {
                *dw += partial;
            }
        }
        dw
    });
    // SAFETY: `x` consists of whole rows as wide as the weight, and a loop has written each row of `dx`.
    (dx.map(|dx| unsafe { dx.assume_init() }), dw)
}
