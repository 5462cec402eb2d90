//! Matrix products: a safe face of the `gemm` crate, which multiplies on one thread.
//!
//! What runs on several is cut into pieces here: the crate's own threads wait for each other several
//! times per product, and one of them packs for all. The sums over `k` are the crate's, whose order
//! depends on `k` alone, so the cut does not change a bit of the result.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::Once;

use super::in_pieces;
use super::real::Real;
use super::transpose::row_major;
use super::unwritten::Unwritten;

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

    /// Rows and columns.
    pub fn shape(self) -> [usize; 2] {
        self.shape
    }

    /// Elements between two rows and between two columns.
    pub fn strides(self) -> [usize; 2] {
        self.strides
    }

    /// The slice that it is stored in.
    pub fn values(self) -> &'a [T] {
        self.values
    }

    /// The given rows and columns.
    ///
    /// # Panics
    ///
    /// If there are not so many.
    pub fn part(self, rows: Range<usize>, columns: Range<usize>) -> Self {
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

    /// Whether columns are contiguous and rows are not.
    fn lies_across(&self) -> bool {
        self.strides[0] == 1 && self.strides[1] > 1
    }

    /// The transposed matrix, in the same memory.
    pub fn t(self) -> Self {
        let ([rows, columns], [row, column]) = (self.shape, self.strides);
        Matrix { values: self.values, shape: [columns, rows], strides: [column, row] }
    }
}

/// A matrix that a product is written to: rows of contiguous elements, `row_stride` apart.
#[derive(Debug)]
pub struct MatrixMut<'a, T> {
    values: *mut T,
    shape: [usize; 2],
    row_stride: usize,
    /// Whether the elements have values that a product may add to.
    written: bool,
    lifetime: PhantomData<&'a mut [T]>,
}

// SAFETY: it is the only way to its elements, as a mutable slice would be.
unsafe impl<T: Send> Send for MatrixMut<'_, T> {}

impl<'a, T: Copy> MatrixMut<'a, T> {
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
        let values = values.as_mut_ptr();
        MatrixMut { values, shape, row_stride, written: true, lifetime: PhantomData }
    }

    /// A view of `values` in row-major order.
    pub fn rows(values: &'a mut [T], shape: [usize; 2]) -> Self {
        Self::new(values, shape, shape[1])
    }

    /// A view of `values`, which have no value yet, in row-major order.
    pub fn unwritten(values: &'a mut [MaybeUninit<T>], shape: [usize; 2]) -> Self {
        check_bounds(values.len(), shape, [shape[1], 1]);
        let (values, row_stride) = (values.as_mut_ptr().cast(), shape[1]);
        MatrixMut { values, shape, row_stride, written: false, lifetime: PhantomData }
    }

    /// `count` matrices that lie side by side, together all columns of this one.
    ///
    /// # Panics
    ///
    /// If the columns cannot be divided so.
    pub fn beside(self, count: usize) -> impl Iterator<Item = MatrixMut<'a, T>> {
        let [rows, columns] = self.shape;
        assert!(columns.is_multiple_of(count), "{columns} columns in {count} matrices");
        let shape = [rows, columns / count];
        // They have no element in common, and each lies inside this one.
        (0..count).map(move |i| MatrixMut {
            values: self.values.wrapping_add(i * shape[1]),
            shape,
            row_stride: self.row_stride,
            written: self.written,
            lifetime: PhantomData,
        })
    }

    /// The rows of the given range.
    ///
    /// # Panics
    ///
    /// If there are not so many.
    pub fn part(&mut self, rows: Range<usize>) -> MatrixMut<'_, T> {
        assert!(
            rows.start <= rows.end && rows.end <= self.shape[0],
            "{rows:?} of {:?}",
            self.shape
        );
        MatrixMut {
            values: self.values.wrapping_add(rows.start * self.row_stride),
            shape: [rows.len(), self.shape[1]],
            row_stride: self.row_stride,
            written: self.written,
            lifetime: PhantomData,
        }
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

/// Multiplications below which a product is not worth a second thread.
const WORTH_A_THREAD: usize = 1 << 20;
/// Multiplications from which on an operand with contiguous columns is copied to rows first.
const WORTH_A_COPY: usize = 1 << 22;
/// Multiplications of every element from which on.
const USES: usize = 128;
/// Rows of a register tile and columns of a vector register of the crate: where cuts are made. Its tiles are
/// up to four registers wide, but an uneven cut costs more than a narrower last tile.
const TILE: [usize; 2] = [6, 16];
/// Columns of the crate's widest register tile: thresholds are multiplied by it.
const WIDEST_TILE: usize = 64;
/// Rows or columns that a piece has on average at least. It keeps more than 64 when cuts are moved to the
/// next tile: the crate has another order of sums for products of at most 64 by 64.
const PIECE: usize = 128;

/// Leaves a row-major left operand where it is: its rows fit in a core's first cache, and reading them
/// there is up to a fifth faster than copying them first, as the crate does by default.
static READ_ROWS_IN_PLACE: Once = Once::new();

/// `lhs · rhs` on the current rayon pool, in row-major order.
///
/// # Panics
///
/// If the shapes do not fit.
pub fn product<T: Real>(lhs: Matrix<'_, T>, rhs: Matrix<'_, T>) -> Vec<T> {
    let shape = [lhs.shape[0], rhs.shape[1]];
    let mut out = Unwritten::new(shape[0] * shape[1]);
    let target = MatrixMut::unwritten(out.slots(), shape);
    gemm(target, Output::Overwrite, T::ONE, lhs, rhs, Threads::Pool);
    // SAFETY: a product that replaces its output writes every element of it.
    unsafe { out.written() }
}

/// `out = scale · lhs · rhs`, or `out += scale · lhs · rhs`.
///
/// # Panics
///
/// If the shapes do not fit, or if something is to be added to what has no value.
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
    assert!(out.written || output == Output::Overwrite, "a product added to no value");
    let on_pool = threads == Threads::Pool;
    let threads = match threads {
        Threads::Pool if m * n * k >= WORTH_A_THREAD => rayon::current_num_threads(),
        _ => 1,
    };
    READ_ROWS_IN_PLACE.call_once(|| gemm::set_rhs_packing_threshold(usize::MAX / WIDEST_TILE));
    // Copied once, in parallel, and faster than the crate would for every piece. (A right operand that lies
    // across is not: the crate packs it all the same, and turning it first takes longer than it saves.)
    let copy = (on_pool && worth_a_copy(lhs, n)).then(|| row_major(lhs));
    let lhs = copy.as_ref().map_or(lhs, |copy| Matrix::rows(copy, [m, k]));
    let target = Target { values: out.values, row_stride: out.row_stride };
    let [row_pieces, column_pieces] = cut([m, n], rhs.strides[1] == 1, threads);
    let piece = |index: usize| {
        let rows = range(m, row_pieces, index / column_pieces, TILE[0]);
        let columns = range(n, column_pieces, index % column_pieces, TILE[1]);
        let target = target.at([rows.start, columns.start]);
        let (lhs, rhs) = (lhs.part(rows, 0..k), rhs.part(0..k, columns));
        // SAFETY: the constructors of the view have checked that every element of its shape is there, the
        // shapes fit (asserted above), and the ranges lie inside them. `out` is borrowed mutably until all
        // pieces are done, so it overlaps neither operand; its rows do not overlap each other and neither
        // do the ranges of pieces, so each element is written by one thread. If values are added to, they
        // are there (asserted above).
        unsafe { multiply(target, output, scale, lhs, rhs) };
    };
    match row_pieces * column_pieces {
        1 => piece(0),
        pieces => in_pieces(pieces, piece),
    }
}

/// Whether the left operand of a product of `n` columns is to be copied to rows first.
pub fn worth_a_copy<T>(lhs: Matrix<'_, T>, n: usize) -> bool {
    let [m, k] = lhs.shape;
    lhs.lies_across() && n >= USES && m * n * k >= WORTH_A_COPY
}

/// How many pieces the rows and the columns of a product are cut into, at most one for each thread:
/// so that as little as possible is packed more than once.
fn cut([m, n]: [usize; 2], rows_of_rhs: bool, threads: usize) -> [usize; 2] {
    let most = |len: usize| (len / PIECE).max(1);
    // To pack across the grain takes about twice as long.
    let effort = if rows_of_rhs { n } else { 2 * n };
    (1..=threads.min(most(m)))
        .map(|rows| [rows, (threads / rows).min(most(n))])
        .max_by_key(|[rows, columns]| {
            (rows * columns, std::cmp::Reverse(rows * effort + columns * m), *columns)
        })
        .unwrap_or([1, 1])
}

/// Part `index` of `0..len` cut into `pieces` at multiples of `tile`, as even as these allow.
fn range(len: usize, pieces: usize, index: usize, tile: usize) -> Range<usize> {
    let at = |index: usize| (len * index / pieces).div_ceil(tile).saturating_mul(tile).min(len);
    match pieces {
        1 => 0..len,
        _ => at(index)..at(index + 1),
    }
}

/// Where a product goes.
#[derive(Clone, Copy)]
struct Target<T> {
    values: *mut T,
    row_stride: usize,
}

// SAFETY: threads write disjoint elements through it: see `multiply`.
unsafe impl<T: Send> Sync for Target<T> {}

impl<T> Target<T> {
    /// The elements from the given row and column on.
    fn at(self, [row, column]: [usize; 2]) -> Self {
        Target { values: self.values.wrapping_add(row * self.row_stride + column), ..self }
    }
}

/// A product on the calling thread.
///
/// # Safety
///
/// The shapes of the operands fit; every element of the product in `target` is valid for writes by this
/// thread alone, apart from the operands, and has a value if `output` is [`Output::Add`].
unsafe fn multiply<T: Real>(
    target: Target<T>,
    output: Output,
    scale: T,
    lhs: Matrix<'_, T>,
    rhs: Matrix<'_, T>,
) {
    let ([m, k], n) = (lhs.shape, rhs.shape[1]);
    if m == 0 || n == 0 {
        return;
    }
    // SAFETY: every element that is read exists, by the views' constructors (where `k` is 0 none is read),
    // and what is written by the caller's contract. `T` is `f32` or `f64`, which `gemm` supports: `Real` is
    // implemented for no other type. The strides fit in `isize` because they are bounded by slice lengths
    // wherever they are used (a dimension of 1 never multiplies its stride).
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            target.values,
            1,
            target.row_stride as isize,
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
            gemm::Parallelism::None,
        );
    }
}
