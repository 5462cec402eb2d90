//! The matrix products of the loss, in the types that they are computed in.

use burn::tensor::bf16;

use super::super::bf16::{Left, Right, Unit};
use super::super::gemm::{Output, Threads, gemm, product};
use super::super::matrix::{Matrix, MatrixMut};
use super::super::real::{Real, Scalar};
use super::super::values::convert_values;

/// Products with a weight, `[d_model, vocab]`, and of operands like it.
pub trait Products {
    /// What is multiplied. Sums are in the type that kernels compute with it in.
    type Operand: Scalar;

    /// `values` for multiplying with them.
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

/// Products of the operands as they are.
pub struct Reals<'a, T> {
    /// `[d_model, vocab]`.
    pub weight: Matrix<'a, T>,
}

impl<T: Real> Products for Reals<'_, T> {
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

/// Products of bf16 by the processor's own instructions, summed in `f32`.
pub struct Halves {
    unit: Unit,
    weight: Right,
    /// Transposed, for gradients.
    turned: Option<Right>,
}

impl Halves {
    /// Packs the weight, `[d_model, vocab]`, once for all blocks of rows.
    pub fn new(unit: Unit, weight: Matrix<'_, bf16>, wanted: [bool; 2]) -> Self {
        let turned = wanted[0].then(|| unit.right(weight.t(), Threads::Pool));
        Halves { unit, weight: unit.right(weight, Threads::Pool), turned }
    }

    fn left<'a>(&self, lhs: Matrix<'a, bf16>) -> Left<'a> {
        self.unit.left(lhs, Threads::Pool)
    }
}

impl Products for Halves {
    type Operand = bf16;

    fn operands(values: Vec<f32>) -> Vec<bf16> {
        convert_values(&values, bf16::nearest)
    }

    fn logits(&self, hidden: Matrix<'_, bf16>) -> Vec<f32> {
        self.unit.product(&self.left(hidden), &self.weight)
    }

    fn hidden_gradient(&self, dlogits: Matrix<'_, bf16>, out: MatrixMut<'_, f32>) {
        let turned = self.turned.as_ref().expect("`new` has packed it for the gradient").all();
        self.unit.multiply(out, Output::Overwrite, &self.left(dlogits), turned, Threads::Pool);
    }

    fn product(&self, lhs: Matrix<'_, bf16>, rhs: Matrix<'_, bf16>) -> Vec<f32> {
        self.unit.product(&self.left(lhs), &self.unit.right(rhs, Threads::Pool))
    }

    fn add_product(&self, out: MatrixMut<'_, f32>, lhs: Matrix<'_, bf16>, rhs: Matrix<'_, bf16>) {
        let rhs = self.unit.right(rhs, Threads::Pool);
        self.unit.multiply(out, Output::Add, &self.left(lhs), rhs.all(), Threads::Pool);
    }
}
