//! Transposed copies of matrices, square by square.

use std::mem::MaybeUninit;

use super::matrix::Matrix;
use super::parallel::for_each_block;
use super::scalar::Real;
use super::transpose_square::SQUARE;
use super::uninit::UninitVec;

/// Rows of the result that one block has: the same number of columns is read side by side.
const ROWS: usize = 4 * SQUARE;

/// A copy in row-major order of `matrix`, whose columns are contiguous.
pub fn row_major<T: Real>(matrix: Matrix<'_, T>) -> Vec<T> {
    let ([rows, columns], [step, stride]) = (matrix.shape(), matrix.strides());
    assert_eq!(step, 1, "a matrix whose columns are contiguous");
    let mut result = UninitVec::new(rows * columns);
    for_each_block(
        result.slots(),
        ROWS * columns.max(1),
        #[inline(always)]
        |start, block| {
            let first = start / columns;
            let size = [block.len() / columns, columns];
            transpose(&matrix.values()[first..], stride, block, columns, size);
        },
    );
    // SAFETY: the blocks are all rows, and `transpose` writes all of a block.
    unsafe { result.assume_init() }
}

/// Writes row `i` of `y`, `size[0]` of them of `size[1]` elements, from column `i` of `x`; rows are
/// `x_stride` and `y_stride` apart.
#[inline(always)]
pub fn transpose<T: Real>(
    x: &[T],
    x_stride: usize,
    y: &mut [MaybeUninit<T>],
    y_stride: usize,
    [rows, columns]: [usize; 2],
) {
    for t in (0..columns).step_by(SQUARE) {
        for i in (0..rows).step_by(SQUARE) {
            if t + SQUARE <= columns && i + SQUARE <= rows {
                let (x, y) = (&x[t * x_stride + i..], &mut y[i * y_stride + t..]);
                T::transpose_square(x, x_stride, y, y_stride);
                continue;
            }
            for t in t..columns.min(t + SQUARE) {
                for i in i..rows.min(i + SQUARE) {
                    y[i * y_stride + t].write(x[t * x_stride + i]);
                }
            }
        }
    }
}
