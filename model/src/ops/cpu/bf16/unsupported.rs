//! A placeholder for processors without bf16 instructions. The type has no value, so its methods are never called.

use std::borrow::Cow;
use std::ops::Range;

use burn::tensor::bf16;

use crate::ops::cpu::matrix::{Matrix, MatrixMut};
use crate::ops::cpu::products::{Multiplier, Output, Products, Threads};
use crate::ops::cpu::scalar::Scalar;

#[derive(Clone, Copy, Debug)]
pub enum Bf16Gemm {}

impl Bf16Gemm {
    pub fn choose(_: &str) -> Option<Self> {
        None
    }

    pub fn name(self) -> &'static str {
        match self {}
    }
}

impl Multiplier<bf16> for Bf16Gemm {
    type Left<'a> = ();
    type Right<'a> = ();
    const ROWS: usize = 1;

    fn left(self, _: Matrix<'_, bf16>, _: Threads) {
        match self {}
    }

    fn copied_left(self, _: Matrix<'_, bf16>, _: usize) -> Option<()> {
        match self {}
    }

    fn right(self, _: Matrix<'_, bf16>, _: Threads) {
        match self {}
    }

    fn transposed_right(self, _: Matrix<'_, bf16>) {
        match self {}
    }

    fn operands(self, _: Cow<'_, [f32]>) -> Cow<'_, [bf16]> {
        match self {}
    }
}

// SAFETY: `multiply` is never called.
unsafe impl<O: Scalar<Real = f32>> Products<bf16, O> for Bf16Gemm {
    fn multiply(self, _: MatrixMut<'_, O>, _: Output<f32>, _: &(), _: &(), _: [Range<usize>; 2], _: Threads) {
        match self {}
    }
}
