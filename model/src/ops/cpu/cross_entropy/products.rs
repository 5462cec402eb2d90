//! The matrix products of the loss, in the types that they are computed in.

use std::ops::Range;

use burn::tensor::bf16;

use super::super::bf16::{Left, Right, Unit};
use super::super::gemm::{Output, Threads, gemm, product};
use super::super::matrix::{Matrix, MatrixMut};
use super::super::real::{Real, Scalar};
use super::super::values::convert_values;
use super::super::{for_each_block, rows_per_block};
use crate::ops::cross_entropy::HeadLayout;

/// The products of a block of rows.
pub trait Products<T> {
    /// The gradients of a block's logits, for multiplying with.
    type Gradient;

    /// The logits of the given rows.
    fn logits(&self, rows: Range<usize>) -> Vec<T>;

    /// What `dlogits`, the gradients of `count` rows of logits, are multiplied as.
    fn gradient(&self, dlogits: Vec<T>, count: usize) -> Self::Gradient;

    /// `dlogits` times the transposed weight.
    fn hidden_gradient(&self, dlogits: &Self::Gradient, dhidden: &mut [T]);

    /// Adds the gradient of the weight that the given rows contribute, each multiplied with its factor.
    fn weight_gradient(
        &self,
        dlogits: &Self::Gradient,
        rows: Range<usize>,
        factor: impl Fn(usize) -> T + Sync + Send,
        dweight: &mut Option<Vec<T>>,
    );
}

/// Products of the operands as they are.
pub struct Reals<'a, T> {
    /// Rows, one after the other.
    pub hidden: &'a [T],
    /// `[d_model, vocab]`.
    pub weight: Matrix<'a, T>,
    /// How its gradient lies.
    pub layout: HeadLayout,
}

impl<T: Real> Products<T> for Reals<'_, T> {
    type Gradient = (Vec<T>, [usize; 2]);

    fn logits(&self, rows: Range<usize>) -> Vec<T> {
        product(rows_of(self.hidden, self.weight.shape()[0], rows), self.weight)
    }

    fn gradient(&self, dlogits: Vec<T>, count: usize) -> Self::Gradient {
        (dlogits, [count, self.weight.shape()[1]])
    }

    fn hidden_gradient(&self, (dlogits, shape): &Self::Gradient, dhidden: &mut [T]) {
        let out = MatrixMut::rows(dhidden, [shape[0], self.weight.shape()[0]]);
        let dlogits = Matrix::rows(dlogits, *shape);
        gemm(out, Output::Overwrite, T::ONE, dlogits, self.weight.t(), Threads::Pool);
    }

    fn weight_gradient(
        &self,
        (dlogits, shape): &Self::Gradient,
        rows: Range<usize>,
        factor: impl Fn(usize) -> T + Sync + Send,
        dweight: &mut Option<Vec<T>>,
    ) {
        let [d_model, vocab] = self.weight.shape();
        let mut hidden =
            rows_of(self.hidden, d_model, rows).values()[..shape[0] * d_model].to_vec();
        scale_rows(&mut hidden, d_model, factor);
        let (hidden, dlogits) =
            (Matrix::rows(&hidden, [shape[0], d_model]), Matrix::rows(dlogits, *shape));
        let (shape, lhs, rhs) = match self.layout {
            HeadLayout::VocabRows => ([vocab, d_model], dlogits.t(), hidden),
            HeadLayout::VocabColumns => ([d_model, vocab], hidden.t(), dlogits),
        };
        match dweight {
            None => *dweight = Some(product(lhs, rhs)),
            Some(dweight) => {
                let out = MatrixMut::rows(dweight, shape);
                gemm(out, Output::Add, T::ONE, lhs, rhs, Threads::Pool);
            }
        }
    }
}

/// Products of bf16 by the processor's own instructions, summed in `f32`.
pub struct Halves<'a> {
    unit: Unit,
    hidden: &'a [bf16],
    shape: [usize; 2],
    layout: HeadLayout,
    /// For logits, `[d_model, vocab]`.
    weight: Right,
    /// For gradients, `[vocab, d_model]`.
    turned: Option<Right>,
}

impl<'a> Halves<'a> {
    /// Packs the weight, `[d_model, vocab]`, once for all blocks.
    pub fn new(
        unit: Unit,
        hidden: &'a [bf16],
        weight: Matrix<'_, bf16>,
        layout: HeadLayout,
        wanted: [bool; 2],
    ) -> Self {
        let turned = wanted[0].then(|| unit.right(weight.t()));
        Halves { unit, hidden, shape: weight.shape(), layout, weight: unit.right(weight), turned }
    }

    fn left(&self, rows: Range<usize>) -> Left<'_> {
        self.unit.left(rows_of(self.hidden, self.shape[0], rows))
    }
}

impl Products<f32> for Halves<'_> {
    type Gradient = (Vec<bf16>, [usize; 2]);

    fn logits(&self, rows: Range<usize>) -> Vec<f32> {
        self.unit.product(&self.left(rows), &self.weight)
    }

    fn gradient(&self, dlogits: Vec<f32>, count: usize) -> Self::Gradient {
        let dlogits = convert_values(&dlogits, bf16::nearest);
        (dlogits, [count, self.shape[1]])
    }

    fn hidden_gradient(&self, (dlogits, shape): &Self::Gradient, dhidden: &mut [f32]) {
        let Some(turned) = &self.turned else { return };
        let out = MatrixMut::rows(dhidden, [shape[0], self.shape[0]]);
        let dlogits = self.unit.left(Matrix::rows(dlogits, *shape));
        self.unit.multiply(out, Output::Overwrite, &dlogits, turned);
    }

    fn weight_gradient(
        &self,
        (dlogits, shape): &Self::Gradient,
        rows: Range<usize>,
        factor: impl Fn(usize) -> f32 + Sync + Send,
        dweight: &mut Option<Vec<f32>>,
    ) {
        let [d_model, vocab] = self.shape;
        let mut hidden =
            rows_of(self.hidden, d_model, rows).values()[..shape[0] * d_model].to_vec();
        for_each_row(
            &mut hidden,
            d_model,
            #[inline(always)]
            |index, row| {
                let factor = factor(index);
                row.iter_mut().for_each(|value| *value = bf16::nearest(value.real() * factor));
            },
        );
        let (hidden, dlogits) =
            (Matrix::rows(&hidden, [shape[0], d_model]), Matrix::rows(dlogits, *shape));
        let (shape, lhs, rhs) = match self.layout {
            HeadLayout::VocabRows => ([vocab, d_model], dlogits.t(), hidden),
            HeadLayout::VocabColumns => ([d_model, vocab], hidden.t(), dlogits),
        };
        let (lhs, rhs) = (self.unit.left(lhs), self.unit.right(rhs));
        match dweight {
            None => *dweight = Some(self.unit.product(&lhs, &rhs)),
            Some(dweight) => {
                self.unit.multiply(MatrixMut::rows(dweight, shape), Output::Add, &lhs, &rhs);
            }
        }
    }
}

/// The given rows of `width` values.
fn rows_of<T>(values: &[T], width: usize, rows: Range<usize>) -> Matrix<'_, T> {
    Matrix::rows(&values[rows.start * width..], [rows.len(), width])
}

/// Multiplies each row of `width` values with its factor.
pub fn scale_rows<T: Real>(
    values: &mut [T],
    width: usize,
    factor: impl Fn(usize) -> T + Sync + Send,
) {
    for_each_row(
        values,
        width,
        #[inline(always)]
        |index, row| {
            let factor = factor(index);
            row.iter_mut().for_each(|value| *value *= factor);
        },
    );
}

/// Runs `f` on every row of `width` values and its index.
fn for_each_row<T: Send>(
    values: &mut [T],
    width: usize,
    f: impl Fn(usize, &mut [T]) + Sync + Send,
) {
    let width = width.max(1);
    for_each_block(
        values,
        rows_per_block(width) * width,
        #[inline(always)]
        |start, block| {
            for (i, row) in block.chunks_exact_mut(width).enumerate() {
                f(start / width + i, row);
            }
        },
    );
}
