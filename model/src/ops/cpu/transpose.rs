//! Transposed copies of matrices, square by square.

use super::matrix::Matrix;
use super::scalar::Real;
use super::transpose_square::SQUARE;
use super::uninit::written;

const ROWS: usize = 4 * SQUARE;

/// Copies `matrix`, whose columns are contiguous, to row-major order.
pub fn row_major<T: Real>(matrix: Matrix<'_, T>) -> Vec<T> {
    let ([rows, columns], [step, stride]) = (matrix.shape(), matrix.strides());
    assert_eq!(step, 1, "a matrix whose columns are contiguous");
    let width = columns.max(1);
    // SAFETY: blocks are whole rows, each written square by square, or element by element at its edges.
    unsafe {
        written(
            rows * columns,
            ROWS * width,
            #[inline(always)]
            |start, y| {
                let (x, rows) = (&matrix.values()[start / width..], y.len() / width);
                for t in (0..columns).step_by(SQUARE) {
                    for i in (0..rows).step_by(SQUARE) {
                        if t + SQUARE <= columns && i + SQUARE <= rows {
                            T::transpose_square(
                                &x[t * stride + i..],
                                stride,
                                &mut y[i * columns + t..],
                                columns,
                            );
                            continue;
                        }
                        for t in t..columns.min(t + SQUARE) {
                            for i in i..rows.min(i + SQUARE) {
                                y[i * columns + t].write(x[t * stride + i]);
                            }
                        }
                    }
                }
            },
        )
    }
}
