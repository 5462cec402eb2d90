//! Views of slices as matrices, for the operands and outputs of products.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

/// A matrix in a slice: element (i, j) is at `i * strides[0] + j * strides[1]`.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a, T> {
    values: &'a [T],
    shape: [usize; 2],
    strides: [usize; 2],
}

impl<'a, T> Matrix<'a, T> {
    /// Creates a view of `values`. Panics if an element would lie outside `values`.
    pub fn new(values: &'a [T], shape: [usize; 2], strides: [usize; 2]) -> Self {
        check_bounds(values.len(), shape, strides);
        Matrix { values, shape, strides }
    }

    /// Creates a view of `values` in row-major order.
    pub fn rows(values: &'a [T], shape: [usize; 2]) -> Self {
        Self::new(values, shape, [shape[1], 1])
    }

    pub fn shape(self) -> [usize; 2] {
        self.shape
    }

    /// Returns the distances in elements between two rows and between two columns.
    pub fn strides(self) -> [usize; 2] {
        self.strides
    }

    pub fn values(self) -> &'a [T] {
        self.values
    }

    /// Returns a view of some rows and columns. Panics if a range exceeds the matrix.
    pub fn slice(self, rows: Range<usize>, columns: Range<usize>) -> Self {
        let within = |range: &Range<usize>, len| range.start <= range.end && range.end <= len;
        assert!(
            within(&rows, self.shape[0]) && within(&columns, self.shape[1]),
            "rows {rows:?} and columns {columns:?} of a matrix of {:?}",
            self.shape
        );
        let shape = [rows.len(), columns.len()];
        let start = rows.start * self.strides[0] + columns.start * self.strides[1];
        let values = if shape.contains(&0) { &[] } else { &self.values[start..] };
        Matrix { values, shape, strides: self.strides }
    }

    /// Returns whether columns are contiguous and rows are not.
    pub fn is_transposed(&self) -> bool {
        self.strides[0] == 1 && self.strides[1] > 1
    }

    pub fn t(self) -> Self {
        let ([rows, columns], [row, column]) = (self.shape, self.strides);
        Matrix { values: self.values, shape: [columns, rows], strides: [column, row] }
    }
}

/// The output of a matrix product: rows of contiguous elements, `row_stride` apart.
#[derive(Debug)]
pub struct MatrixMut<'a, T> {
    values: *mut T,
    shape: [usize; 2],
    row_stride: usize,
    /// True if the elements are initialised, so that a product may add to them.
    init: bool,
    lifetime: PhantomData<&'a mut [T]>,
}

// SAFETY: the view is the only access to its elements, as a mutable slice would be.
unsafe impl<T: Send> Send for MatrixMut<'_, T> {}

impl<'a, T: Copy> MatrixMut<'a, T> {
    /// Creates a view with rows `row_stride` apart. Panics if rows would overlap or leave `values`.
    pub fn new(values: &'a mut [T], shape: [usize; 2], row_stride: usize) -> Self {
        check_bounds(values.len(), shape, [row_stride, 1]);
        assert!(shape[0] <= 1 || row_stride >= shape[1], "rows of {} elements, {row_stride} apart", shape[1]);
        let values = values.as_mut_ptr();
        MatrixMut { values, shape, row_stride, init: true, lifetime: PhantomData }
    }

    /// Creates a view of `values` in row-major order.
    pub fn rows(values: &'a mut [T], shape: [usize; 2]) -> Self {
        Self::new(values, shape, shape[1])
    }

    pub fn uninit(values: &'a mut [MaybeUninit<T>], shape: [usize; 2]) -> Self {
        check_bounds(values.len(), shape, [shape[1], 1]);
        let (values, row_stride) = (values.as_mut_ptr().cast(), shape[1]);
        MatrixMut { values, shape, row_stride, init: false, lifetime: PhantomData }
    }

    pub fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// Returns the address of the first element and the row stride. Only this matrix accesses the elements.
    pub fn raw(&mut self) -> Target<T> {
        Target { values: self.values, row_stride: self.row_stride }
    }

    pub fn is_init(&self) -> bool {
        self.init
    }

    /// Splits the columns into `count` adjacent matrices. Panics if `count` does not divide them.
    pub fn split_columns(self, count: usize) -> impl Iterator<Item = MatrixMut<'a, T>> {
        let [rows, columns] = self.shape;
        assert!(columns.is_multiple_of(count), "{columns} columns in {count} matrices");
        let shape = [rows, columns / count];
        (0..count).map(move |i| MatrixMut { values: self.values.wrapping_add(i * shape[1]), shape, ..self })
    }

    /// Returns a range of rows. Panics if the range exceeds the matrix.
    pub fn slice(&mut self, rows: Range<usize>) -> MatrixMut<'_, T> {
        assert!(rows.start <= rows.end && rows.end <= self.shape[0], "{rows:?} of {:?}", self.shape);
        let values = self.values.wrapping_add(rows.start * self.row_stride);
        MatrixMut { values, shape: [rows.len(), self.shape[1]], ..*self }
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

/// An output shared by threads that write disjoint elements.
#[derive(Clone, Copy, Debug)]
pub struct Target<T> {
    pub values: *mut T,
    pub row_stride: usize,
}

// SAFETY: writing through a target is unsafe, and threads that do so write disjoint elements.
unsafe impl<T: Send> Sync for Target<T> {}

impl<T> Target<T> {
    pub fn at(self, [row, column]: [usize; 2]) -> Self {
        Target { values: self.values.wrapping_add(row * self.row_stride + column), ..self }
    }
}
