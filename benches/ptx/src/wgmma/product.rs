//! Executes the part of a `wgmma` product that a warp has: 16 of its 64 rows.
//!
//! Registers of A and of D are those of products of a warp (`mma.sync.m16n8k16`), of which D has one every eight
//! columns: lane l has the rows l / 4 and l / 4 + 8 of the warp's 16, and d4j to d4j+3 are the columns 8j + 2 (l % 4)
//! and the next of the one and of the other row. Sums are those of `mma.sync` as well. The whole product happens when
//! it is issued, and not, as on a GPU, until it is waited for.

use crate::access::{Lane, Local, Memory, Span};
use crate::error::{Fault, Space};
use crate::float;
use crate::lanes::{ALL, Registers};
use crate::matrix::{self, COLUMNS, ROWS};
use crate::program::{Kind, WarpgroupProduct};
use crate::wgmma::descriptor::{CHUNK, Descriptor};

/// Warps of a warpgroup.
pub const WARPS: usize = 4;

/// Elements along the sum.
const K: usize = 16;

/// Elements of a chunk.
const EIGHT: usize = 8;

/// `mma_async`: registers of D; those of A or its descriptor, the descriptor of B, whether D is added.
pub fn execute(
    memory: &mut Memory<'_>,
    local: &mut Local<'_>,
    r: &mut Registers,
    form: &WarpgroupProduct,
    o: &[u16],
) -> Lane<()> {
    let (d, operands) = o.split_at(usize::from(form.columns / 2));
    let [a @ .., b, adds] = operands else { return Ok(()) };
    let left = match a {
        [descriptor] if !form.a_in_registers => {
            let mut rows = [[0.0; K]; ROWS];
            let matrix = Matrix { descriptor: of_warp(r, *descriptor)?, mn_major: form.transposed_a };
            let first = local.warp % WARPS * ROWS;
            matrix.read(memory, local, form.kind, first..first + ROWS, |row, k, value| {
                rows[row - first][k] = value;
            })?;
            rows
        }
        registers => matrix::left(r, form.kind, registers),
    };
    let matrix = Matrix { descriptor: of_warp(r, *b)?, mn_major: form.transposed_b };
    let mut right = [[[0.0; COLUMNS]; K]; 256 / COLUMNS];
    matrix.read(memory, local, form.kind, 0..usize::from(form.columns), |column, k, value| {
        right[column / COLUMNS][k][column % COLUMNS] = value;
    })?;
    let adds = r.predicate(*adds) == ALL;
    for (d, right) in d.chunks(4).zip(&right) {
        matrix::add_product(r, K, [d, if adds { d } else { &[] }], &left, right);
    }
    Ok(())
}

/// The descriptor that all lanes have.
fn of_warp(r: &Registers, register: u16) -> Lane<Descriptor> {
    Descriptor::read(r.wide(register)[0]).map_err(|fault| (0, Box::new(fault)))
}

/// A matrix in shared memory.
struct Matrix {
    descriptor: Descriptor,
    mn_major: bool,
}

impl Matrix {
    /// Reads the elements of rows of A, or columns of B.
    fn read(
        &self,
        memory: &mut Memory<'_>,
        local: &mut Local<'_>,
        kind: Kind,
        lines: std::ops::Range<usize>,
        mut put: impl FnMut(usize, usize, f32),
    ) -> Lane<()> {
        let mut chunk = |line: usize, k: usize| {
            let address = u64::from(self.descriptor.chunk(self.mn_major, line as u32, k as u32));
            let span = Span { space: Space::Shared, address, bytes: CHUNK, part: EIGHT as u32 };
            let bits = memory.read(local, 0, span).map_err(|fault: Fault| (0, Box::new(fault)))?;
            for n in 0..EIGHT {
                let half = (bits >> (16 * n)) as u32 & 0xffff;
                let value = if kind == Kind::F16 { float::from_f16(half) } else { float::from_bf16(half) };
                if self.mn_major { put(line + n, k, value) } else { put(line, k + n, value) }
            }
            Ok(())
        };
        for first in lines.step_by(if self.mn_major { EIGHT } else { 1 }) {
            (0..K).step_by(if self.mn_major { 1 } else { EIGHT }).try_for_each(|k| chunk(first, k))?;
        }
        Ok(())
    }
}
