//! Products of panels with AVX512-BF16.

use std::arch::x86_64::{__m512bh, _mm512_dpbf16_ps, _mm512_set1_epi32, _mm512_setzero_ps};
use std::mem::transmute;

use super::pack::{Panel, Sums};

/// Proof that the processor has AVX512-BF16.
#[derive(Clone, Copy, Debug)]
pub struct Vectors(());

/// Rows whose sums are in registers at a time: with two vectors of columns, 16 of the 32 registers.
const ROWS: usize = 8;

impl Vectors {
    pub fn try_new() -> Option<Vectors> {
        (is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bf16")).then_some(Vectors(()))
    }

    /// Multiplies the 32 rows of one panel with the 32 columns of another, into `sums`.
    ///
    /// # Safety
    ///
    /// `lhs` and `rhs` must have `blocks` blocks.
    pub unsafe fn multiply(self, lhs: Panel, rhs: Panel, blocks: usize, sums: &mut Sums) {
        for (group, sums) in sums.0.as_chunks_mut::<ROWS>().0.iter_mut().enumerate() {
            let row = group * ROWS;
            let start = lhs.start.wrapping_add(row / 16 * lhs.second + row % 16 * lhs.row);
            // SAFETY: the processor has the instructions (`self`), and the caller guarantees the blocks.
            unsafe { rows(Panel { start, ..lhs }, rhs, blocks, sums) };
        }
    }
}

/// # Safety
///
/// As [`Vectors::multiply`], with [`ROWS`] rows of one square at `lhs`.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn rows(lhs: Panel, rhs: Panel, blocks: usize, out: &mut [[f32; 32]; ROWS]) {
    let mut sums = [[_mm512_setzero_ps(); 2]; ROWS];
    for block in 0..blocks {
        for pair in 0..16 {
            let line = rhs.start.wrapping_add(block * rhs.block + pair * rhs.row);
            // SAFETY: a block of the right panel is two squares of 16 lines of 64 bytes, with that alignment.
            let columns =
                unsafe { [0, rhs.second].map(|half| line.wrapping_add(half).cast::<__m512bh>().read()) };
            let words = lhs.start.wrapping_add(block * lhs.block + 4 * pair);
            for (row, sums) in sums.iter_mut().enumerate() {
                // SAFETY: a block of a row is 16 words.
                let word = unsafe { words.wrapping_add(row * lhs.row).cast::<i32>().read_unaligned() };
                // SAFETY: 512 bits either way.
                let word: __m512bh = unsafe { transmute(_mm512_set1_epi32(word)) };
                for (sum, columns) in sums.iter_mut().zip(columns) {
                    *sum = _mm512_dpbf16_ps(*sum, word, columns);
                }
            }
        }
    }
    for (out, sums) in out.iter_mut().zip(sums) {
        // SAFETY: two vectors of 16 floats are 32 floats.
        *out = unsafe { transmute::<[_; 2], [f32; 32]>(sums) };
    }
}
