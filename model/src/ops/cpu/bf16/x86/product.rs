//! Products of packed operands, tile by tile on several threads.

use std::mem::MaybeUninit;
use std::ops::Range;
use std::slice;

use burn::tensor::bf16;
use pulp::NullaryFnOnce;

use super::Unit;
use super::pack::{BLOCK_LINES, DEPTH, Line, PANEL, Panels, Side};
use super::tiles::Tiles;
use super::vectors::Vectors;
use crate::ops::cpu::gemm::{Output, Threads};
use crate::ops::cpu::in_pieces;
use crate::ops::cpu::matrix::{Matrix, MatrixMut, Target};
use crate::ops::cpu::real::Scalar;
use crate::ops::cpu::unwritten::Unwritten;

/// The instructions that multiply two panels.
#[derive(Clone, Copy, Debug)]
pub enum Kernel {
    /// AMX.
    Tiles(Tiles),
    /// AVX512-BF16.
    Vectors(Vectors),
}

/// Where a kernel finds a panel; distances in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Panel {
    /// Its first line.
    pub start: *const u8,
    /// From one line of a square to the next.
    pub row: usize,
    /// From the first square of a block to the second.
    pub second: usize,
    /// From one block to the next.
    pub block: usize,
}

/// The sums of a panel of rows and a panel of columns.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Sums(pub [[f32; PANEL]; PANEL]);

/// A left operand: rows are read where they are, if they can be.
#[derive(Debug)]
pub struct Left<'a> {
    /// `[m, k]`; its first panels are read in place.
    matrix: Option<Matrix<'a, bf16>>,
    in_place: usize,
    /// The panels after them.
    panels: Panels,
    shape: [usize; 2],
}

/// A right operand.
#[derive(Debug)]
pub struct Right {
    panels: Panels,
    /// `[k, n]`.
    shape: [usize; 2],
}

/// Some rows and columns of a right operand.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    panels: &'a Panels,
    first_panel: usize,
    first_block: usize,
    /// `[k, n]`.
    shape: [usize; 2],
}

/// Multiplications from which on a product is worth a second thread.
const WORTH_A_THREAD: usize = 1 << 22;

impl Left<'_> {
    fn panel(&self, index: usize) -> Panel {
        match self.matrix {
            Some(matrix) if index < self.in_place => {
                let row = matrix.strides()[0];
                let start = matrix.values()[index * PANEL * row..].as_ptr().cast();
                let row = row * size_of::<bf16>();
                Panel { start, row, second: PANEL / 2 * row, block: DEPTH * size_of::<bf16>() }
            }
            _ => packed(&self.panels, index - self.in_place, 0),
        }
    }
}

impl Right {
    /// All of it.
    pub fn all(&self) -> Part<'_> {
        Part { panels: &self.panels, first_panel: 0, first_block: 0, shape: self.shape }
    }

    /// The given rows and columns, which begin at multiples of 32. Rows that do not end at one need a left
    /// operand that was packed, as every one is whose `k` is no such multiple.
    ///
    /// # Panics
    ///
    /// If there are not so many, or they begin elsewhere.
    pub fn part(&self, rows: Range<usize>, columns: Range<usize>) -> Part<'_> {
        let fits = rows.start <= rows.end
            && rows.end <= self.shape[0]
            && columns.start <= columns.end
            && columns.end <= self.shape[1];
        let begins = rows.start.is_multiple_of(DEPTH) && columns.start.is_multiple_of(PANEL);
        assert!(fits && begins, "rows {rows:?} and columns {columns:?} of {:?}", self.shape);
        Part {
            panels: &self.panels,
            first_panel: columns.start / PANEL,
            first_block: rows.start / DEPTH,
            shape: [rows.len(), columns.len()],
        }
    }
}

impl Part<'_> {
    fn panel(&self, index: usize) -> Panel {
        packed(self.panels, self.first_panel + index, self.first_block)
    }
}

fn packed(panels: &Panels, index: usize, first_block: usize) -> Panel {
    const LINE: usize = size_of::<Line>();
    let start = panels.panel(index)[first_block * BLOCK_LINES..].as_ptr().cast();
    Panel { start, row: LINE, second: BLOCK_LINES / 2 * LINE, block: BLOCK_LINES * LINE }
}

impl Unit {
    /// `lhs`, `[m, k]`, for multiplying with it any number of times.
    pub fn left(self, lhs: Matrix<'_, bf16>, threads: Threads) -> Left<'_> {
        let [m, k] = lhs.shape();
        let rows = lhs.strides()[1] == 1 && k.is_multiple_of(DEPTH);
        let in_place = if rows { m / PANEL } else { 0 };
        let panels = Panels::new(self.simd, Side::Left, lhs, in_place * PANEL, threads);
        Left { matrix: rows.then_some(lhs), in_place, panels, shape: [m, k] }
    }

    /// `lhs` in memory of its own.
    pub fn copied_left(self, lhs: Matrix<'_, bf16>) -> Left<'static> {
        let panels = Panels::new(self.simd, Side::Left, lhs, 0, Threads::Pool);
        Left { matrix: None, in_place: 0, panels, shape: lhs.shape() }
    }

    /// `rhs`, `[k, n]`, for multiplying with it any number of times.
    pub fn right(self, rhs: Matrix<'_, bf16>, threads: Threads) -> Right {
        let panels = Panels::new(self.simd, Side::Right, rhs.t(), 0, threads);
        Right { panels, shape: rhs.shape() }
    }

    /// `lhs · rhs` in row-major order, every element rounded once, on the current rayon pool.
    ///
    /// # Panics
    ///
    /// If the shapes do not fit.
    pub fn product<O: Scalar<Real = f32>>(self, lhs: &Left<'_>, rhs: &Right) -> Vec<O> {
        let shape = [lhs.shape[0], rhs.shape[1]];
        let mut out = Unwritten::new(shape[0] * shape[1]);
        let target = MatrixMut::unwritten(out.slots(), shape);
        self.multiply(target, Output::Overwrite, lhs, rhs.all(), Threads::Pool);
        // SAFETY: a product that replaces its output writes every element of it.
        unsafe { out.written() }
    }

    /// `out = lhs · rhs`, or `out += lhs · rhs`, every element rounded once.
    ///
    /// # Panics
    ///
    /// If the shapes do not fit, or if something is to be added to what has no value.
    pub fn multiply<O: Scalar<Real = f32>>(
        self,
        mut out: MatrixMut<'_, O>,
        output: Output,
        lhs: &Left<'_>,
        rhs: Part<'_>,
        threads: Threads,
    ) {
        let ([m, n], k) = (out.shape(), lhs.shape[1]);
        assert!(
            lhs.shape == [m, k] && rhs.shape == [k, n],
            "product of {:?} and {:?} into {:?}",
            lhs.shape,
            rhs.shape,
            out.shape()
        );
        assert!(out.is_written() || output == Output::Overwrite, "a product added to no value");
        let panels = [m.div_ceil(PANEL), n.div_ceil(PANEL)];
        let threads = match threads {
            Threads::Pool if m * n * k >= WORTH_A_THREAD => rayon::current_num_threads(),
            _ => 1,
        };
        // Along the longer side, which divides more evenly.
        let along = usize::from(panels[1] > panels[0]);
        let pieces = threads.min(panels[along]).max(1);
        let (target, shape) = (out.raw(), [m, n]);
        let piece = |index| {
            let mut parts = panels.map(|count| 0..count);
            let cut = |index| panels[along] * index / pieces;
            parts[along] = cut(index)..cut(index + 1);
            let piece = Piece { kernel: self.kernel, target, output, lhs, rhs, shape, parts };
            // Compiled for vectors, which the kernels' processors have.
            self.simd.vectorize(piece);
        };
        match pieces {
            1 => piece(0),
            pieces => in_pieces(pieces, piece),
        }
    }
}

/// The panels of a product that one thread multiplies.
///
/// Its shapes fit, no other piece has one of its panels, and its output is there, valid for writes by it
/// alone, and has values if they are to be added to.
struct Piece<'a, O> {
    kernel: Kernel,
    target: Target<O>,
    output: Output,
    lhs: &'a Left<'a>,
    rhs: Part<'a>,
    shape: [usize; 2],
    parts: [Range<usize>; 2],
}

impl<O: Scalar<Real = f32>> NullaryFnOnce for Piece<'_, O> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        match self.kernel {
            Kernel::Tiles(tiles) => {
                let tiles = tiles.configure();
                // SAFETY: what `for_each` gives are panels of `blocks` blocks.
                self.for_each(
                    #[inline(always)]
                    |lhs, rhs, blocks, sums| unsafe { tiles.multiply(lhs, rhs, blocks, sums) },
                );
            }
            Kernel::Vectors(vectors) => {
                // SAFETY: as above.
                self.for_each(
                    #[inline(always)]
                    |lhs, rhs, blocks, sums| unsafe { vectors.multiply(lhs, rhs, blocks, sums) },
                );
            }
        }
    }
}

impl<O: Scalar<Real = f32>> Piece<'_, O> {
    #[inline(always)]
    fn for_each(&self, multiply: impl Fn(Panel, Panel, usize, &mut Sums)) {
        let blocks = self.lhs.shape[1].div_ceil(DEPTH);
        let mut sums = Sums([[0.0; PANEL]; PANEL]);
        let mut one = |i: usize, j: usize| {
            if blocks > 0 {
                multiply(self.lhs.panel(i), self.rhs.panel(j), blocks, &mut sums);
            }
            self.write(&sums, [i * PANEL, j * PANEL]);
        };
        let [rows, columns] = self.parts.clone();
        // The longer operand is read once, the shorter one from a cache.
        if rows.len() <= columns.len() {
            columns.for_each(|j| rows.clone().for_each(|i| one(i, j)));
        } else {
            rows.for_each(|i| columns.clone().for_each(|j| one(i, j)));
        }
    }

    /// Writes the sums of the panels that begin at the given row and column.
    #[inline(always)]
    fn write(&self, sums: &Sums, [row, column]: [usize; 2]) {
        let [rows, columns] = [self.shape[0] - row, self.shape[1] - column].map(|n| n.min(PANEL));
        for (i, sums) in sums.0[..rows].iter().enumerate() {
            let target = self.target.at([row + i, column]).values.cast::<MaybeUninit<O>>();
            // SAFETY: these elements are in the output, and this piece alone has them (see `Piece`).
            let target = unsafe { slice::from_raw_parts_mut(target, columns) };
            match target.as_mut_array::<PANEL>() {
                Some(target) => self.write_row(target, sums),
                None => self.write_row(target, &sums[..columns]),
            }
        }
    }

    #[inline(always)]
    fn write_row(&self, target: &mut [MaybeUninit<O>], sums: &[f32]) {
        match self.output {
            Output::Overwrite => {
                for (target, &sum) in target.iter_mut().zip(sums) {
                    target.write(O::nearest(sum));
                }
            }
            Output::Add => {
                for (target, &sum) in target.iter_mut().zip(sums) {
                    // SAFETY: there are values if they are to be added to (see `Piece`).
                    let before = unsafe { target.assume_init() }.real();
                    target.write(O::nearest(before + sum));
                }
            }
        }
    }
}
