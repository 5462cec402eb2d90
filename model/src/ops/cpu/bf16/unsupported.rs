//! Stands in on processors without such instructions. No value of these types exists, so no method is ever
//! called.

use std::convert::Infallible;
use std::marker::PhantomData;
use std::ops::Range;

use burn::tensor::bf16;

use crate::ops::cpu::gemm::{Output, Threads};
use crate::ops::cpu::matrix::{Matrix, MatrixMut};
use crate::ops::cpu::scalar::Scalar;

/// The instructions for products of bf16.
#[derive(Clone, Copy, Debug)]
pub struct Bf16Gemm(Infallible);

/// A left operand.
#[derive(Debug)]
pub struct Left<'a>(Infallible, PhantomData<&'a bf16>);

/// A right operand.
#[derive(Debug)]
pub struct Right(Infallible);

/// Some rows and columns of a right operand.
#[derive(Clone, Copy, Debug)]
pub struct RightSlice<'a>(Infallible, PhantomData<&'a bf16>);

impl Right {
    /// Never called.
    pub fn all(&self) -> RightSlice<'_> {
        match self.0 {}
    }

    /// Never called.
    pub fn slice(&self, _: Range<usize>, _: Range<usize>) -> RightSlice<'_> {
        match self.0 {}
    }
}

impl Bf16Gemm {
    /// `None`: this processor has no such instructions.
    pub fn choose(_: &str) -> Option<Self> {
        None
    }

    /// Never called.
    pub fn name(self) -> &'static str {
        match self.0 {}
    }

    /// Never called.
    pub fn left(self, _: Matrix<'_, bf16>, _: Threads) -> Left<'_> {
        match self.0 {}
    }

    /// Never called.
    pub fn copied_left(self, _: Matrix<'_, bf16>) -> Left<'static> {
        match self.0 {}
    }

    /// Never called.
    pub fn right(self, _: Matrix<'_, bf16>, _: Threads) -> Right {
        match self.0 {}
    }

    /// Never called.
    pub fn multiply<O: Scalar<Real = f32>>(
        self,
        _: MatrixMut<'_, O>,
        _: Output,
        lhs: &Left<'_>,
        _: RightSlice<'_>,
        _: Threads,
    ) {
        match lhs.0 {}
    }

    /// Never called.
    pub fn product<O: Scalar<Real = f32>>(self, _: &Left<'_>, _: &Right) -> Vec<O> {
        match self.0 {}
    }
}
