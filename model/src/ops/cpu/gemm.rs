//! Matrix products: a safe face of the `gemm` crate.

use super::real::Real;

/// A matrix stored in a slice: element (i, j) is at `i * strides[0] + j * strides[1]`.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a, T> {
    values: &'a [T],
    shape: [usize; 2],
    strides: [usize; 2],
}

impl<'a, T> Matrix<'a, T> {
    /// A view of `values`.
    ///
    /// # Panics
    ///
    /// If an element would lie outside `values`.
    pub fn new(values: &'a [T], shape: [usize; 2], strides: [usize; 2]) -> Self {
        check_bounds(values.len(), shape, strides);
        Matrix { values, shape, strides }
    }

    /// A view of `values` in row-major order.
    pub fn rows(values: &'a [T], shape: [usize; 2]) -> Self {
        Self::new(values, shape, [shape[1], 1])
    }

    /// The transposed matrix, in the same memory.
    pub fn t(self) -> Self {
        let ([rows, columns], [row, column]) = (self.shape, self.strides);
        Matrix { values: self.values, shape: [columns, rows], strides: [column, row] }
    }
}

/// A matrix that a product is written to.
#[derive(Debug)]
pub struct MatrixMut<'a, T> {
    values: &'a mut [T],
    shape: [usize; 2],
    strides: [usize; 2],
}

impl<'a, T> MatrixMut<'a, T> {
    /// A view of `values` whose rows are `row_stride` apart.
    ///
    /// # Panics
    ///
    /// If an element would lie outside `values` or rows would overlap.
    pub fn new(values: &'a mut [T], shape: [usize; 2], row_stride: usize) -> Self {
        check_bounds(values.len(), shape, [row_stride, 1]);
        assert!(
            shape[0] <= 1 || row_stride >= shape[1],
            "rows of {} elements, {row_stride} apart",
            shape[1]
        );
        MatrixMut { values, shape, strides: [row_stride, 1] }
    }

    /// A view of `values` in row-major order.
    pub fn rows(values: &'a mut [T], shape: [usize; 2]) -> Self {
        Self::new(values, shape, shape[1])
    }
}

fn check_bounds(len: usize, shape: [usize; 2], strides: [usize; 2]) {
    if shape.contains(&0) {
        return;
    }
    let last = (shape[0] - 1)
        .checked_mul(strides[0])
        .zip((shape[1] - 1).checked_mul(strides[1]))
        .and_then(|(row, column)| row.checked_add(column));
    assert!(
        last.is_some_and(|last| last < len && last <= isize::MAX as usize),
        "a matrix of shape {shape:?} and strides {strides:?} in {len} elements"
    );
}

/// What a product does with the values that are already in its output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// Replaces them without reading them.
    Overwrite,
    /// Adds to them.
    Add,
}

/// The threads a product runs on. The result has the same bits either way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Threads {
    /// The calling thread, for products inside a parallel loop.
    One,
    /// The current rayon pool.
    Pool,
}

/// `out = scale · lhs · rhs`, or `out += scale · lhs · rhs`.
///
/// # Panics
///
/// If the shapes do not fit.
pub fn gemm<T: Real>(
    out: MatrixMut<'_, T>,
    output: Output,
    scale: T,
    lhs: Matrix<'_, T>,
    rhs: Matrix<'_, T>,
    threads: Threads,
) {
    let ([m, n], k) = (out.shape, lhs.shape[1]);
    assert!(
        lhs.shape == [m, k] && rhs.shape == [k, n],
        "product of {:?} and {:?} into {:?}",
        lhs.shape,
        rhs.shape,
        out.shape
    );
    let parallelism = match (threads, rayon::current_num_threads()) {
        (Threads::One, _) | (_, 0 | 1) => gemm::Parallelism::None,
        (Threads::Pool, threads) => gemm::Parallelism::Rayon(threads),
    };
    // SAFETY: the constructors of the views have checked that every element (i, j) within each
    // shape lies inside its slice, and the shapes fit (asserted above). `out` is borrowed mutably,
    // so it overlaps neither operand, and its rows do not overlap each other, so threads that write
    // different elements write different memory. `T` is `f32` or `f64`, which `gemm` supports:
    // `Real` is implemented for no other type. The strides fit in `isize` because they are bounded
    // by slice lengths wherever they are used (a dimension of 1 never multiplies its stride).
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.values.as_mut_ptr(),
            out.strides[1] as isize,
            out.strides[0] as isize,
            output == Output::Add,
            lhs.values.as_ptr(),
            lhs.strides[1] as isize,
            lhs.strides[0] as isize,
            rhs.values.as_ptr(),
            rhs.strides[1] as isize,
            rhs.strides[0] as isize,
            T::ONE,
            scale,
            false,
            false,
            false,
            parallelism,
        );
    }
}
