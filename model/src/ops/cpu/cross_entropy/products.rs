//! The matrix products of the loss, in each type that they are computed in.

use burn::tensor::bf16;

use super::super::bf16::{Bf16Gemm, Left, Right};
use super::super::gemm::{Output, Threads, gemm, product};
use super::super::matrix::{Matrix, MatrixMut};
use super::super::scalar::{Real, Scalar};
use super::super::values::convert_values;

/// Products with a weight, `[d_model, vocab]`, and of operands of the same type.
pub trait Products {
    /// The type of operands. Sums have the type that kernels compute it in.
    type Operand: Scalar;

    /// `values` as operands.
    fn operands(values: Vec<<Self::Operand as Scalar>::Real>) -> Vec<Self::Operand>;

    /// `hidden · weight`.
    fn logits(&self, hidden: Matrix<'_, Self::Operand>) -> Vec<<Self::Operand as Scalar>::Real>;

    /// `dlogits · weightᵀ`.
    fn hidden_gradient(
        &self,
        dlogits: Matrix<'_, Self::Operand>,
        out: MatrixMut<'_, <Self::Operand as Scalar>::Real>,
    );

    /// `lhs · rhs`.
    fn product(
        &self,
        lhs: Matrix<'_, Self::Operand>,
        rhs: Matrix<'_, Self::Operand>,
    ) -> Vec<<Self::Operand as Scalar>::Real>;

    /// `out += lhs · rhs`.
    fn add_product(
        &self,
        out: MatrixMut<'_, <Self::Operand as Scalar>::Real>,
        lhs: Matrix<'_, Self::Operand>,
        rhs: Matrix<'_, Self::Operand>,
    );
}

/// Products in `f32` and `f64`.
pub struct FloatProducts<'a, T> {
    /// `[d_model, vocab]`.
    pub weight: Matrix<'a, T>,
}

impl<T: Real> Products for FloatProducts<'_, T> {
    type Operand = T;

    fn operands(values: Vec<T>) -> Vec<T> {
        values
    }

    fn logits(&self, hidden: Matrix<'_, T>) -> Vec<T> {
        product(hidden, self.weight)
    }

    fn hidden_gradient(&self, dlogits: Matrix<'_, T>, out: MatrixMut<'_, T>) {
        gemm(out, Output::Overwrite, T::ONE, dlogits, self.weight.t(), Threads::Pool);
    }

    fn product(&self, lhs: Matrix<'_, T>, rhs: Matrix<'_, T>) -> Vec<T> {
        product(lhs, rhs)
    }

    fn add_product(&self, out: MatrixMut<'_, T>, lhs: Matrix<'_, T>, rhs: Matrix<'_, T>) {
        gemm(out, Output::Add, T::ONE, lhs, rhs, Threads::Pool);
    }
}

/// Products in bf16 by the processor's own instructions, summed in `f32`.
pub struct Bf16Products {
    gemm: Bf16Gemm,
    weight: Right,
    /// The transposed weight, for gradients of hidden values.
    transposed: Option<Right>,
}

impl Bf16Products {
    /// Packs the weight, `[d_model, vocab]`, once for all blocks of rows.
    pub fn new(gemm: Bf16Gemm, weight: Matrix<'_, bf16>, wanted: [bool; 2]) -> Self {
        let transposed = wanted[0].then(|| gemm.right(weight.t(), Threads::Pool));
        Bf16Products { gemm, weight: gemm.right(weight, Threads::Pool), transposed }
    }

    fn left<'a>(&self, lhs: Matrix<'a, bf16>) -> Left<'a> {
        self.gemm.left(lhs, Threads::Pool)
    }
}

impl Products for Bf16Products {
    type Operand = bf16;

    fn operands(values: Vec<f32>) -> Vec<bf16> {
        convert_values(&values, bf16::nearest)
    }

    fn logits(&self, hidden: Matrix<'_, bf16>) -> Vec<f32> {
        self.gemm.product(&self.left(hidden), &self.weight)
    }

    fn hidden_gradient(&self, dlogits: Matrix<'_, bf16>, out: MatrixMut<'_, f32>) {
        let transposed = self.transposed.as_ref().expect("`new` has packed it for the gradient").all();
        self.gemm.multiply(out, Output::Overwrite, &self.left(dlogits), transposed, Threads::Pool);
    }

    fn product(&self, lhs: Matrix<'_, bf16>, rhs: Matrix<'_, bf16>) -> Vec<f32> {
        self.gemm.product(&self.left(lhs), &self.gemm.right(rhs, Threads::Pool))
    }

    fn add_product(&self, out: MatrixMut<'_, f32>, lhs: Matrix<'_, bf16>, rhs: Matrix<'_, bf16>) {
        let rhs = self.gemm.right(rhs, Threads::Pool);
        self.gemm.multiply(out, Output::Add, &self.left(lhs), rhs.all(), Threads::Pool);
    }
}
