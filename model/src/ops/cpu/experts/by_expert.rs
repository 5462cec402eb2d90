//! Products with an expert's matrices, and sums over the choices of a token.

use std::mem::MaybeUninit;

use super::super::matrix::{Matrix, MatrixMut};
use super::super::parallel::rows_per_block;
use super::super::products::{Output, Products, Threads};
use super::super::scalar::{Real, Scalar};
use super::super::uninit::written;
use super::groups::Groups;
use crate::ops::experts::ExpertsShape;

pub fn expert_matrix<S>(stacked: &[S], expert: usize, shape: [usize; 2]) -> Matrix<'_, S> {
    let len = shape[0] * shape[1];
    Matrix::rows(&stacked[expert * len..][..len], shape)
}

/// Returns the right operand of each expert that has rows.
pub fn right_operands<'a, S: Scalar, P: Products<S, S>>(
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

/// Writes `lhs · rhs` to `out`, on one thread, and returns `out`.
pub fn product<'a, S: Scalar, P: Products<S, S>>(
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

pub fn gather<S: Copy>(values: &[S], width: usize, tokens: impl Iterator<Item = usize>) -> Vec<S> {
    let mut rows = Vec::with_capacity(tokens.size_hint().0 * width);
    tokens.for_each(|token| rows.extend_from_slice(&values[token * width..][..width]));
    rows
}

/// Sums the rows of each token, in the order of its choices: `[tokens, width]`.
pub fn sum_by_token<S: Scalar>(rows: &[S], groups: &Groups, shape: ExpertsShape) -> Vec<S> {
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
