//! Products of packed operands, tile by tile on several threads.

use std::borrow::Cow;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::slice;

use burn::tensor::bf16;
use pulp::NullaryFnOnce;

use super::instructions::{Bf16Gemm, Kernel};
use super::pack::{BLOCK_LINES, DEPTH, Line, PANEL, Panel, Panels, Side, Sums};
use crate::ops::cpu::matrix::{Matrix, MatrixMut, Target};
use crate::ops::cpu::parallel::for_each_task;
use crate::ops::cpu::products::{Multiplier, Output, Products, Threads};
use crate::ops::cpu::scalar::Scalar;
use crate::ops::cpu::values::convert_values;

/// A left operand. Rows are read in place if their layout allows.
#[derive(Debug)]
pub struct Left<'a> {
    /// `[m, k]`, of which the first `in_place` panels are read in place.
    matrix: Option<Matrix<'a, bf16>>,
    in_place: usize,
    panels: Panels,
    shape: [usize; 2],
}

#[derive(Debug)]
pub struct Right {
    panels: Panels,
    /// `[k, n]`.
    shape: [usize; 2],
}

/// Minimum multiplications for which a product uses a second thread.
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

fn packed(panels: &Panels, index: usize, first_block: usize) -> Panel {
    const LINE: usize = size_of::<Line>();
    let start = panels.panel(index)[first_block * BLOCK_LINES..].as_ptr().cast();
    Panel { start, row: LINE, second: BLOCK_LINES / 2 * LINE, block: BLOCK_LINES * LINE }
}

impl Multiplier<bf16> for Bf16Gemm {
    type Left<'a> = Left<'a>;
    type Right<'a> = Right;
    const ROWS: usize = 2 * PANEL;

    fn left(self, lhs: Matrix<'_, bf16>, threads: Threads) -> Left<'_> {
        let [m, k] = lhs.shape();
        let rows = lhs.strides()[1] == 1 && k.is_multiple_of(DEPTH);
        let in_place = if rows { m / PANEL } else { 0 };
        let panels = Panels::new(self.simd, Side::Left, lhs, in_place * PANEL, threads);
        Left { matrix: rows.then_some(lhs), in_place, panels, shape: [m, k] }
    }

    fn copied_left(self, lhs: Matrix<'_, bf16>, _: usize) -> Option<Left<'static>> {
        let panels = Panels::new(self.simd, Side::Left, lhs, 0, Threads::Pool);
        Some(Left { matrix: None, in_place: 0, panels, shape: lhs.shape() })
    }

    fn right(self, rhs: Matrix<'_, bf16>, threads: Threads) -> Right {
        let panels = Panels::new(self.simd, Side::Right, rhs.t(), 0, threads);
        Right { panels, shape: rhs.shape() }
    }

    fn transposed_right(self, rhs: Matrix<'_, bf16>) -> Right {
        self.right(rhs, Threads::One)
    }

    fn operands(self, values: Cow<'_, [f32]>) -> Cow<'_, [bf16]> {
        Cow::Owned(convert_values(&values, bf16::nearest))
    }
}

// SAFETY: the tasks of `multiply` cover all panels of the output, and write every element of their panels.
unsafe impl<O: Scalar<Real = f32>> Products<bf16, O> for Bf16Gemm {
    fn multiply(
        self,
        mut out: MatrixMut<'_, O>,
        output: Output<f32>,
        lhs: &Left<'_>,
        rhs: &Right,
        part: [Range<usize>; 2],
        threads: Threads,
    ) {
        let [rows, columns] = part;
        let fits = rows.start <= rows.end
            && rows.end <= rhs.shape[0]
            && columns.start <= columns.end
            && columns.end <= rhs.shape[1];
        let begins = rows.start.is_multiple_of(DEPTH) && columns.start.is_multiple_of(PANEL);
        assert!(fits && begins, "rows {rows:?} and columns {columns:?} of {:?}", rhs.shape);
        // If `rows` does not end at a multiple of 32, `k` does not either, and such a left operand is packed.
        let ([m, n], k) = (out.shape(), lhs.shape[1]);
        let part = [rows.len(), columns.len()];
        assert!(
            lhs.shape == [m, k] && part == [k, n],
            "product of {:?} and {part:?} into {:?}",
            lhs.shape,
            out.shape()
        );
        let first = [columns.start / PANEL, rows.start / DEPTH];
        assert!(out.is_init() || output != Output::Add, "a product added to no value");
        let panels = [m.div_ceil(PANEL), n.div_ceil(PANEL)];
        let threads = match threads {
            Threads::Pool if m * n * k >= WORTH_A_THREAD => rayon::current_num_threads(),
            _ => 1,
        };
        // The longer side divides more evenly.
        let along = usize::from(panels[1] > panels[0]);
        let tasks = threads.min(panels[along]).max(1);
        let (target, shape) = (out.raw(), [m, n]);
        let task = |index| {
            let mut ranges = panels.map(|count| 0..count);
            let cut = |index| panels[along] * index / tasks;
            ranges[along] = cut(index)..cut(index + 1);
            let task = Task { kernel: self.kernel, target, output, lhs, rhs, first, shape, ranges };
            // Compiled for AVX-512, which every processor with these instructions has.
            self.simd.vectorize(task);
        };
        match tasks {
            1 => task(0),
            tasks => for_each_task(tasks, task),
        }
    }
}

/// The panels of a product that one thread multiplies.
///
/// Shapes match, and tasks have disjoint panels. Only this task writes its elements of the output, which are valid for
/// writes, and initialised if the product is added to them.
struct Task<'a, O> {
    kernel: Kernel,
    target: Target<O>,
    output: Output<f32>,
    lhs: &'a Left<'a>,
    rhs: &'a Right,
    /// Panel and block of `rhs` where the product begins.
    first: [usize; 2],
    shape: [usize; 2],
    ranges: [Range<usize>; 2],
}

impl<O: Scalar<Real = f32>> NullaryFnOnce for Task<'_, O> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        match self.kernel {
            Kernel::Tiles(tiles) => {
                let tiles = tiles.configure();
                // SAFETY: `for_each` passes panels of `blocks` blocks, and `blocks` is not 0.
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

impl<O: Scalar<Real = f32>> Task<'_, O> {
    #[inline(always)]
    fn for_each(&self, multiply: impl Fn(Panel, Panel, usize, &mut Sums)) {
        let blocks = self.lhs.shape[1].div_ceil(DEPTH);
        let mut sums = Sums([[0.0; PANEL]; PANEL]);
        let mut one = |i: usize, j: usize| {
            if blocks > 0 {
                let rhs = packed(&self.rhs.panels, self.first[0] + j, self.first[1]);
                multiply(self.lhs.panel(i), rhs, blocks, &mut sums);
            }
            self.write(&sums, [i * PANEL, j * PANEL]);
        };
        let [rows, columns] = self.ranges.clone();
        // The longer operand is read once, the shorter one from the cache.
        if rows.len() <= columns.len() {
            columns.for_each(|j| rows.clone().for_each(|i| one(i, j)));
        } else {
            rows.for_each(|i| columns.clone().for_each(|j| one(i, j)));
        }
    }

    #[inline(always)]
    fn write(&self, sums: &Sums, [row, column]: [usize; 2]) {
        let [rows, columns] = [self.shape[0] - row, self.shape[1] - column].map(|n| n.min(PANEL));
        for (i, sums) in sums.0[..rows].iter().enumerate() {
            let target = self.target.at([row + i, column]).values.cast::<MaybeUninit<O>>();
            // SAFETY: these elements are in the output, and only this task accesses them (see `Task`).
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
            Output::Overwrite(scale) => {
                for (target, &sum) in target.iter_mut().zip(sums) {
                    target.write(O::nearest(sum * scale));
                }
            }
            Output::Add => {
                for (target, &sum) in target.iter_mut().zip(sums) {
                    // SAFETY: the output is initialised if the product is added to it (see `Task`).
                    let before = unsafe { target.assume_init() }.real();
                    target.write(O::nearest(before + sum));
                }
            }
        }
    }
}
