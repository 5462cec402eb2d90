//! Operands packed into panels: 32 rows of the left operand, or 32 columns of the right operand.
//!
//! Operands are `[len, k]`, in blocks of 32 along `k`. A block is two AMX tiles of 16 lines of 64 bytes. A line has 16
//! words of two adjacent elements along `k`: of one row in a left operand, of 16 columns in a right operand. Elements
//! beyond an edge are zero.

use std::mem::MaybeUninit;

use burn::tensor::bf16;
use pulp::x86::V4;
use pulp::{NullaryFnOnce, cast};
use rayon::prelude::*;

use crate::ops::cpu::matrix::Matrix;
use crate::ops::cpu::products::Threads;
use crate::ops::cpu::transpose_square::avx512::transposed;
use crate::ops::cpu::uninit::UninitVec;

/// Rows (of a left operand) or columns (of a right one) per panel.
pub const PANEL: usize = 32;
/// Elements per block along `k`.
pub const DEPTH: usize = 32;
pub const BLOCK_LINES: usize = 2 * SIDE;
/// Lines per square, and words per line.
const SIDE: usize = 16;
const TASK: usize = 1024;

/// A line: one row of a tile.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
pub struct Line([u32; SIDE]);

/// Address of a panel. Strides are in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Panel {
    pub start: *const u8,
    /// Stride between lines of a square.
    pub row: usize,
    /// Stride between the two squares of a block.
    pub second: usize,
    /// Stride between blocks.
    pub block: usize,
}

/// The products of the rows of one panel with the columns of another.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Sums(pub [[f32; PANEL]; PANEL]);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Left,
    Right,
}

#[derive(Debug)]
pub struct Panels {
    lines: Vec<Line>,
    blocks: usize,
}

impl Panels {
    /// Packs `source`, `[len, k]`, from row (or column) `first` on.
    pub fn new(simd: V4, side: Side, source: Matrix<'_, bf16>, first: usize, threads: Threads) -> Self {
        let [len, k] = source.shape();
        let blocks = k.div_ceil(DEPTH);
        let count = len.saturating_sub(first).div_ceil(PANEL);
        let mut lines = UninitVec::new(count * blocks * BLOCK_LINES);
        let panel_lines = (blocks * BLOCK_LINES).max(1);
        let panels = TASK.div_ceil(panel_lines);
        let task = |(task, lines): (usize, _)| {
            let first = first + task * panels * PANEL;
            simd.vectorize(Copy { simd, side, source, first, blocks, lines });
        };
        let tasks = panels * panel_lines;
        match threads {
            Threads::One => lines.slots().chunks_mut(tasks).enumerate().for_each(task),
            Threads::Pool => lines.slots().par_chunks_mut(tasks).enumerate().for_each(task),
        }
        // SAFETY: the tasks cover all lines, and `Copy` writes all of its lines.
        Panels { lines: unsafe { lines.assume_init() }, blocks }
    }

    pub fn panel(&self, index: usize) -> &[Line] {
        let size = self.blocks * BLOCK_LINES;
        &self.lines[index * size..][..size]
    }
}

struct Copy<'a> {
    simd: V4,
    side: Side,
    source: Matrix<'a, bf16>,
    first: usize,
    blocks: usize,
    lines: &'a mut [MaybeUninit<Line>],
}

impl NullaryFnOnce for Copy<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Copy { simd, side, source, first, blocks, lines } = self;
        for (panel, lines) in lines.chunks_exact_mut(blocks * BLOCK_LINES).enumerate() {
            for (block, lines) in lines.chunks_exact_mut(BLOCK_LINES).enumerate() {
                for (half, lines) in lines.chunks_exact_mut(SIDE).enumerate() {
                    let at = [first + panel * PANEL + half * SIDE, block * DEPTH];
                    for (line, words) in lines.iter_mut().zip(square(simd, side, source, at)) {
                        line.write(Line(words));
                    }
                }
            }
        }
    }
}

/// Returns the square that begins at the given indices along `len` and `k`.
#[inline(always)]
fn square(
    simd: V4,
    side: Side,
    source: Matrix<'_, bf16>,
    [first, first_k]: [usize; 2],
) -> [[u32; SIDE]; SIDE] {
    let ([len, k], [step, step_k]) = (source.shape(), source.strides());
    let values = source.values();
    let mut lines = [[0; SIDE]; SIDE];
    // Loops, because the closure of a `from_fn` is compiled separately, without vector instructions.
    let lines_of = if first + SIDE > len || first_k + DEPTH > k {
        for (i, line) in lines.iter_mut().enumerate().take(len.saturating_sub(first)) {
            for (pair, word) in line.iter_mut().enumerate() {
                let at = |k_index: usize| match k_index < k {
                    true => values[(first + i) * step + k_index * step_k],
                    false => bf16::ZERO,
                };
                *word = word_of(at(first_k + 2 * pair), at(first_k + 2 * pair + 1));
            }
        }
        Side::Left
    } else if step_k == 1 {
        for (i, line) in lines.iter_mut().enumerate() {
            let (row, _) = values[(first + i) * step + first_k..].as_chunks::<DEPTH>();
            *line = cast::<[bf16; DEPTH], [u32; SIDE]>(row[0]);
        }
        Side::Left
    } else if step == 1 {
        for (pair, line) in lines.iter_mut().enumerate() {
            let k_index = first_k + 2 * pair;
            let (even, _) = values[k_index * step_k + first..].as_chunks::<SIDE>();
            let (odd, _) = values[(k_index + 1) * step_k + first..].as_chunks::<SIDE>();
            let words = |x: [bf16; SIDE]| simd.avx512f._mm512_cvtepu16_epi32(cast(x));
            let odd = simd.avx512f._mm512_slli_epi32::<16>(words(odd[0]));
            *line = cast(simd.avx512f._mm512_or_epi32(words(even[0]), odd));
        }
        Side::Right
    } else {
        for (i, line) in lines.iter_mut().enumerate() {
            for (pair, word) in line.iter_mut().enumerate() {
                let start = (first + i) * step + (first_k + 2 * pair) * step_k;
                *word = word_of(values[start], values[start + step_k]);
            }
        }
        Side::Left
    };
    if side == lines_of { lines } else { transposed(simd, lines.map(cast)).map(cast) }
}

#[inline(always)]
fn word_of(even: bf16, odd: bf16) -> u32 {
    u32::from(even.to_bits()) | u32::from(odd.to_bits()) << 16
}
