//! Matrix products: a safe interface to the `gemm` crate, used with one thread per call.
//!
//! Products are cut into chunks per thread here, because the crate's own threads wait for each other. Sums over `k`
//! have an order that depends only on `k`, so the cut does not change the result.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Once;

use super::matrix::{Matrix, MatrixMut};
use super::parallel::for_each_task;
use super::products::{Multiplier, Output, Products, Threads};
use super::scalar::Real;
use super::transpose::row_major;

/// Minimum multiplications for which a product uses a second thread.
const WORTH_A_THREAD: usize = 1 << 20;
/// Minimum multiplications for which a transposed left operand is copied to row-major order.
const WORTH_A_COPY: usize = 1 << 22;
/// Minimum multiplications per copied element.
const USES: usize = 128;
/// Rows of the crate's register tile, and columns of its vector register: chunks are cut at multiples of these.
const TILE: [usize; 2] = [6, 16];
/// Columns of the crate's widest register tile, by which the crate multiplies thresholds.
const WIDEST_TILE: usize = 64;
/// Minimum average rows or columns per chunk. The crate sums products of up to 64 × 64 in a different order.
const CHUNK: usize = 128;

/// Makes the crate read a row-major left operand in place instead of copying it: up to a fifth faster.
static READ_ROWS_IN_PLACE: Once = Once::new();

/// Products of `f32` or `f64`.
#[derive(Clone, Copy, Debug)]
pub struct Floats;

pub enum Operand<'a, T> {
    View(Matrix<'a, T>),
    Copy(Vec<T>, [usize; 2]),
}

impl<T: Real> Operand<'_, T> {
    fn copied(matrix: Matrix<'_, T>) -> Self {
        Operand::Copy(row_major(matrix), matrix.shape())
    }

    fn view(&self) -> Matrix<'_, T> {
        match self {
            Operand::View(matrix) => *matrix,
            Operand::Copy(values, shape) => Matrix::rows(values, *shape),
        }
    }
}

impl<T: Real> Multiplier<T> for Floats {
    type Left<'a> = Operand<'a, T>;
    type Right<'a> = Operand<'a, T>;
    /// Maximum rows that `gemm` multiplies without packing the other operand: eight register tiles of six.
    const ROWS: usize = 48;

    fn left(self, lhs: Matrix<'_, T>, _: Threads) -> Operand<'_, T> {
        Operand::View(lhs)
    }

    fn copied_left(self, lhs: Matrix<'_, T>, n: usize) -> Option<Operand<'static, T>> {
        worth_a_copy(lhs, n).then(|| Operand::copied(lhs))
    }

    fn right(self, rhs: Matrix<'_, T>, _: Threads) -> Operand<'_, T> {
        Operand::View(rhs)
    }

    /// Copies the operand, so that products read both operands along contiguous axes and pack nothing.
    fn transposed_right(self, rhs: Matrix<'_, T>) -> Operand<'_, T> {
        Operand::copied(rhs)
    }

    fn operands(self, values: Cow<'_, [T]>) -> Cow<'_, [T]> {
        values
    }
}

// SAFETY: `gemm` writes every element of an output that it replaces.
unsafe impl<T: Real> Products<T, T> for Floats {
    fn multiply(
        self,
        out: MatrixMut<'_, T>,
        output: Output<T>,
        lhs: &Operand<'_, T>,
        rhs: &Operand<'_, T>,
        [rows, columns]: [Range<usize>; 2],
        threads: Threads,
    ) {
        gemm(out, output, lhs.view(), rhs.view().slice(rows, columns), threads);
    }
}

fn gemm<T: Real>(
    mut out: MatrixMut<'_, T>,
    output: Output<T>,
    lhs: Matrix<'_, T>,
    rhs: Matrix<'_, T>,
    threads: Threads,
) {
    let ([m, n], k) = (out.shape(), lhs.shape()[1]);
    assert!(
        lhs.shape() == [m, k] && rhs.shape() == [k, n],
        "product of {:?} and {:?} into {:?}",
        lhs.shape(),
        rhs.shape(),
        out.shape()
    );
    assert!(out.is_init() || output != Output::Add, "a product added to no value");
    let on_pool = threads == Threads::Pool;
    let threads = match threads {
        Threads::Pool if m * n * k >= WORTH_A_THREAD => rayon::current_num_threads(),
        _ => 1,
    };
    READ_ROWS_IN_PLACE.call_once(|| gemm::set_rhs_packing_threshold(usize::MAX / WIDEST_TILE));
    // Copying a transposed left operand once, in parallel, is faster than the crate's copy per chunk. For a
    // transposed right operand, which the crate always packs, a copy takes longer than it saves.
    let copy = (on_pool && worth_a_copy(lhs, n)).then(|| row_major(lhs));
    let lhs = copy.as_ref().map_or(lhs, |copy| Matrix::rows(copy, [m, k]));
    let target = out.raw();
    let [row_chunks, column_chunks] = cut([m, n], rhs.strides()[1] == 1, threads);
    let scale = if let Output::Overwrite(scale) = output { scale } else { T::ONE };
    let task = |index: usize| {
        let rows = range(m, row_chunks, index / column_chunks, TILE[0]);
        let columns = range(n, column_chunks, index % column_chunks, TILE[1]);
        if rows.is_empty() || columns.is_empty() {
            return;
        }
        let target = target.at([rows.start, columns.start]);
        let (lhs, rhs) = (lhs.slice(rows, 0..k), rhs.slice(0..k, columns));
        // SAFETY: the views' constructors have checked that all elements of their shapes exist (no operand is read
        // if `k` is 0), the shapes match, and the ranges lie inside them. `out` is borrowed mutably, so it overlaps
        // neither operand; rows and chunks are disjoint, so one thread writes each element. Elements to add to are
        // initialised (asserted above). `gemm` supports every `Real`: `f32` and `f64`. Strides fit in `isize`, as
        // slice lengths bound them wherever they are used.
        unsafe {
            gemm::gemm(
                lhs.shape()[0],
                rhs.shape()[1],
                k,
                target.values,
                1,
                target.row_stride as isize,
                output == Output::Add,
                lhs.values().as_ptr(),
                lhs.strides()[1] as isize,
                lhs.strides()[0] as isize,
                rhs.values().as_ptr(),
                rhs.strides()[1] as isize,
                rhs.strides()[0] as isize,
                T::ONE,
                scale,
                false,
                false,
                false,
                gemm::Parallelism::None,
            );
        }
    };
    match row_chunks * column_chunks {
        1 => task(0),
        chunks => for_each_task(chunks, task),
    }
}

fn worth_a_copy<T: Real>(lhs: Matrix<'_, T>, n: usize) -> bool {
    let [m, k] = lhs.shape();
    lhs.is_transposed() && n >= USES && m * n * k >= WORTH_A_COPY
}

/// Returns the number of chunks of rows and of columns, at most one per thread, that packs operands least often.
fn cut([m, n]: [usize; 2], rows_of_rhs: bool, threads: usize) -> [usize; 2] {
    let most = |len: usize| (len / CHUNK).max(1);
    // Packing a transposed operand takes about twice as long.
    let effort = if rows_of_rhs { n } else { 2 * n };
    (1..=threads.min(most(m)))
        .map(|rows| [rows, (threads / rows).min(most(n))])
        .max_by_key(|[rows, columns]| {
            (rows * columns, std::cmp::Reverse(rows * effort + columns * m), *columns)
        })
        .unwrap_or([1, 1])
}

/// Returns chunk `index` of `0..len`, cut at multiples of `tile` into `chunks` nearly equal chunks.
fn range(len: usize, chunks: usize, index: usize, tile: usize) -> Range<usize> {
    let at = |index: usize| (len * index / chunks).div_ceil(tile).saturating_mul(tile).min(len);
    match chunks {
        1 => 0..len,
        _ => at(index)..at(index + 1),
    }
}
