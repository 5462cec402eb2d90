//! The kernels of a mixture of experts: rows in groups by expert, each group multiplied with its expert's weights.
//!
//! `groups` sorts the rows and cuts them into blocks, which threads compute; `forward` and `backward` say what a block
//! does. The cut depends on the groups alone.

mod backward;
mod forward;
mod groups;

use std::mem::MaybeUninit;

use burn::backend::Flex;
use burn_flex::FlexTensor;

use super::bf16::bf16_gemm_for;
use super::dispatch::with_products;
use super::matrix::{Matrix, MatrixMut};
use super::parallel::rows_per_block;
use super::products::{Output, Products, Threads};
use super::scalar::{Real, Scalar};
use super::uninit::written;
use super::values::{Values, int_values, tensor_of};
use crate::ops::experts::{ExpertsKernels, ExpertsShape, Hidden, Operands};
use backward::{Backward, Gradients};
use forward::Forward;
use groups::Groups;

impl ExpertsKernels for Flex {
    fn experts_forward(
        [x, weights, gate, up, down]: Operands<&FlexTensor>,
        experts: &FlexTensor,
        shape: ExpertsShape,
    ) -> (FlexTensor, Hidden<Flex>) {
        let groups = Groups::new(&int_values(experts), shape);
        with_products!(bf16_gemm_for([x, gate, up, down]), x.dtype(), products, S => {
            let (x_values, weights) = (Values::<S>::of(x), Values::<<S as Scalar>::Real>::of(weights));
            let projections = [gate, up, down].map(Values::<S>::of);
            let forward = Forward {
                shape,
                groups: &groups,
                x: &x_values,
                weights: &weights,
                projections: projections.each_ref().map(|values| &values[..]),
            };
            let (y, hidden) = forward.run(products);
            let hidden = hidden.map(|values| tensor_of(values, [shape.rows(), shape.d_ff], x.dtype()));
            (tensor_of(y, [shape.tokens, shape.d_model], x.dtype()), hidden)
        })
    }

    fn experts_backward(
        [x, weights, gate, up, down]: Operands<&FlexTensor>,
        experts: &FlexTensor,
        hidden: &Hidden<Flex>,
        dy: &FlexTensor,
        shape: ExpertsShape,
        wanted: Operands<bool>,
    ) -> Operands<Option<FlexTensor>> {
        let groups = Groups::new(&int_values(experts), shape);
        let dtypes = [x, weights, gate, up, down].map(FlexTensor::dtype);
        with_products!(bf16_gemm_for([x, gate, up, down, dy]), x.dtype(), products, S => {
            let (x_values, dy) = (Values::<S>::of(x), Values::<S>::of(dy));
            let weight_values = Values::<<S as Scalar>::Real>::of(weights);
            let projections = [gate, up, down].map(Values::<S>::of);
            let hidden = hidden.each_ref().map(Values::<S>::of);
            let backward = Backward {
                shape,
                groups: &groups,
                x: &x_values,
                weights: &weight_values,
                projections: projections.each_ref().map(|values| &values[..]),
                hidden: hidden.each_ref().map(|values| &values[..]),
                dy: &dy,
            };
            let Gradients { x: dx, weights: dw, projections: [dgate, dup, ddown] } =
                backward.run(products, wanted);
            let ExpertsShape { tokens, per_token, experts, d_model, d_ff } = shape;
            [
                dx.map(|values| tensor_of(values, [tokens, d_model], dtypes[0])),
                dw.map(|values| tensor_of(values, [tokens, per_token], dtypes[1])),
                dgate.map(|values| tensor_of(values, [experts, d_model, d_ff], dtypes[2])),
                dup.map(|values| tensor_of(values, [experts, d_model, d_ff], dtypes[3])),
                ddown.map(|values| tensor_of(values, [experts, d_ff, d_model], dtypes[4])),
            ]
        })
    }
}

/// The weights of one expert, `[rows, columns]`, of those of all.
fn expert_matrix<S>(stacked: &[S], expert: usize, shape: [usize; 2]) -> Matrix<'_, S> {
    let len = shape[0] * shape[1];
    Matrix::rows(&stacked[expert * len..][..len], shape)
}

/// The right operand of each expert that has rows.
fn right_operands<'a, S: Scalar, P: Products<S, S>>(
    products: P,
    groups: &Groups,
    matrix: impl Fn(usize) -> Matrix<'a, S> + Sync + Send,
) -> Vec<Option<P::Right<'a>>> {
    let operand = |expert: usize| {
        let used = !groups.rows_of(expert).is_empty();
        used.then(|| products.right(matrix(expert), Threads::Pool))
    };
    (0..groups.experts()).map(operand).collect()
}

/// Writes `lhs · rhs` to `out`, and returns it. On one thread.
fn product<'a, S: Scalar, P: Products<S, S>>(
    products: P,
    out: &'a mut [MaybeUninit<S>],
    [m, k, n]: [usize; 3],
    lhs: &P::Left<'_>,
    rhs: &P::Right<'_>,
) -> &'a mut [S] {
    let target = MatrixMut::uninit(out, [m, n]);
    let replace = Output::Overwrite(S::Real::ONE);
    products.multiply(target, replace, lhs, rhs, [0..k, 0..n], Threads::One);
    // SAFETY: a product that replaces its output writes every element of it.
    unsafe { out.assume_init_mut() }
}

/// `values` of tokens in the order of the rows of a block.
fn gather<S: Copy>(values: &[S], width: usize, tokens: impl Iterator<Item = usize>) -> Vec<S> {
    let mut rows = Vec::with_capacity(tokens.size_hint().0 * width);
    tokens.for_each(|token| rows.extend_from_slice(&values[token * width..][..width]));
    rows
}

/// The sum of the rows of each token, in the order of its choices: `[tokens, width]` of `rows`, which are in the
/// order of the groups.
fn sum_by_token<S: Scalar>(rows: &[S], groups: &Groups, shape: ExpertsShape) -> Vec<S> {
    let ExpertsShape { tokens, per_token, d_model, .. } = shape;
    let mut y = Vec::new();
    if per_token == 0 || d_model == 0 {
        y.resize(tokens * d_model, S::nearest(S::Real::ZERO));
        return y;
    }
    let row = |choice: usize| &rows[groups.row(choice) * d_model..][..d_model];
    // SAFETY: blocks are whole rows of the result, and each row is written.
    unsafe {
        written(
            tokens * d_model,
            rows_per_block(d_model) * d_model,
            #[inline(always)]
            |start, block| {
                for (i, y) in block.chunks_exact_mut(d_model).enumerate() {
                    let first = (start / d_model + i) * per_token;
                    let y = y.write_copy_of_slice(row(first));
                    for choice in first + 1..first + per_token {
                        for (y, &value) in y.iter_mut().zip(row(choice)) {
                            *y = S::nearest(y.real() + value.real());
                        }
                    }
                }
            },
        )
    }
}
