//! Matrix products of operands of one type, for kernels written once for all types.

use std::borrow::Cow;
use std::ops::Range;

use super::matrix::{Matrix, MatrixMut};
use super::scalar::{Real, Scalar};
use super::uninit::UninitVec;

/// Treatment of the values that an output contains before a product.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Output<T> {
    /// Overwrites the values, without reading them, with the product times this factor.
    Overwrite(T),
    /// Adds the product to the values.
    Add,
}

/// Threads that a product runs on. Both choices give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Threads {
    /// The calling thread, for products inside a parallel loop.
    One,
    Pool,
}

/// A way to multiply `S`: [`Floats`](super::gemm::Floats), or [`Bf16Gemm`](super::bf16::Bf16Gemm) for bf16.
pub trait Multiplier<S: Scalar>: Copy + Sync {
    /// A left operand, for any number of products.
    type Left<'a>;
    /// A right operand, for any number of products.
    type Right<'a>: Send + Sync;
    /// Maximum rows of a left operand that attention multiplies at a time.
    const ROWS: usize;

    /// Prepares `lhs`, `[m, k]`, as a left operand.
    fn left(self, lhs: Matrix<'_, S>, threads: Threads) -> Self::Left<'_>;

    /// Copies `lhs` for several products of `n` columns each, or returns `None` if a copy would not be faster.
    fn copied_left(self, lhs: Matrix<'_, S>, n: usize) -> Option<Self::Left<'static>>;

    /// Prepares `rhs`, `[k, n]`, as a right operand.
    fn right(self, rhs: Matrix<'_, S>, threads: Threads) -> Self::Right<'_>;

    /// Prepares `rhs`, whose columns are contiguous, for many products on one thread.
    fn transposed_right(self, rhs: Matrix<'_, S>) -> Self::Right<'_>;

    /// Converts `values` to elements of operands.
    fn operands(self, values: Cow<'_, [S::Real]>) -> Cow<'_, [S]>;
}

/// Matrix products whose sums are rounded once, to `O`.
///
/// # Safety
///
/// [`Products::multiply`] must write every element of an output that it overwrites.
pub unsafe trait Products<S: Scalar, O: Scalar<Real = S::Real>>: Multiplier<S> {
    /// Writes the product of `lhs` and a part of `rhs`, whose rows and columns begin at multiples of 32.
    ///
    /// # Panics
    ///
    /// If the shapes do not match, or if the product would be added to uninitialised elements.
    fn multiply(
        self,
        out: MatrixMut<'_, O>,
        output: Output<S::Real>,
        lhs: &Self::Left<'_>,
        rhs: &Self::Right<'_>,
        part: [Range<usize>; 2],
        threads: Threads,
    );

    /// Returns `[m, k] · [k, n]` in row-major order, on the current rayon pool. Panics if shapes do not match.
    fn product(self, lhs: &Self::Left<'_>, rhs: &Self::Right<'_>, [m, k, n]: [usize; 3]) -> Vec<O> {
        let mut out = UninitVec::new(m * n);
        let target = MatrixMut::uninit(out.slots(), [m, n]);
        self.multiply(target, Output::Overwrite(S::Real::ONE), lhs, rhs, [0..k, 0..n], Threads::Pool);
        // SAFETY: a product that replaces its output writes every element of it.
        unsafe { out.assume_init() }
    }
}
