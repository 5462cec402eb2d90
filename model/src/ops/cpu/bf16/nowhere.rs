//! Stands in where no such instructions are known.

use std::convert::Infallible;
use std::marker::PhantomData;
use std::ops::Range;

use burn::tensor::bf16;

use crate::ops::cpu::gemm::{Output, Threads};
use crate::ops::cpu::matrix::{Matrix, MatrixMut};
use crate::ops::cpu::real::Scalar;

/// There is none, so nothing below is ever called.
#[derive(Clone, Copy, Debug)]
pub struct Unit(Infallible);

/// A left operand, of which there is none.
#[derive(Debug)]
pub struct Left<'a>(Infallible, PhantomData<&'a bf16>);

/// A right operand, of which there is none.
#[derive(Debug)]
pub struct Right(Infallible);

/// A part of one, of which there is none.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a>(Infallible, PhantomData<&'a bf16>);

impl Right {
    /// Nothing.
    pub fn all(&self) -> Part<'_> {
        match self.0 {}
    }

    /// Nothing.
    pub fn part(&self, _: Range<usize>, _: Range<usize>) -> Part<'_> {
        match self.0 {}
    }
}

impl Unit {
    /// None.
    pub fn get() -> Option<Unit> {
        None
    }

    /// Nothing's name.
    pub fn name(self) -> &'static str {
        match self.0 {}
    }

    /// Nothing.
    pub fn left(self, _: Matrix<'_, bf16>, _: Threads) -> Left<'_> {
        match self.0 {}
    }

    /// Nothing.
    pub fn copied_left(self, _: Matrix<'_, bf16>) -> Left<'static> {
        match self.0 {}
    }

    /// Nothing.
    pub fn right(self, _: Matrix<'_, bf16>, _: Threads) -> Right {
        match self.0 {}
    }

    /// Nothing.
    pub fn multiply<O: Scalar<Real = f32>>(
        self,
        _: MatrixMut<'_, O>,
        _: Output,
        lhs: &Left<'_>,
        _: Part<'_>,
        _: Threads,
    ) {
        match lhs.0 {}
    }

    /// Nothing.
    pub fn product<O: Scalar<Real = f32>>(self, _: &Left<'_>, _: &Right) -> Vec<O> {
        match self.0 {}
    }
}
