//! Loads the left and right operands of tensor cores from shared memory into registers.

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

use super::stage::place_of;
use super::tile::Tile;

/// Loads the rows of a tile as left operands, to keep in registers, if [`Tile::keeps_rows`] is set. Call
/// [`arrive`](super::stage::arrive) first. Otherwise, the result is never read.
#[cube]
pub(super) fn keep_rows<E: Float, N: Size>(
    rows: &Shared<[Vector<E, N>]>,
    #[comptime] tile: Tile,
) -> Array<u32> {
    let mut kept = Array::<u32>::new(comptime!(if tile.keeps_rows { tile.head_dim / 4 } else { 1 }));
    if comptime!(tile.keeps_rows) {
        let (plane, unit) = (UNIT_POS as usize / 32, UNIT_POS as usize % 32);
        let row = plane * comptime!(8 * tile.rows_per_unit) + unit % 16;
        #[unroll]
        for k in 0..comptime!(tile.head_dim / 16) {
            let column = unit / 16 + comptime!(2 * k);
            let at = place_of(0usize, row, column, comptime!(tile.rows), tile);
            let registers = load::<E, N>(rows, at, MatrixIdent::A, false);
            #[unroll]
            for i in 0..4usize {
                kept[comptime!(4 * k + i)] = *registers.index(i);
            }
        }
    }
    kept
}

/// Reads four fragments of 8 × 8. `at` is the index of this unit's row of one of the fragments.
#[cube]
pub(super) fn load<E: Float, N: Size>(
    values: &Shared<[Vector<E, N>]>,
    at: usize,
    #[comptime] operand: MatrixIdent,
    #[comptime] transposed: bool,
) -> Sequence<u32> {
    let instruction = MmaDefinition::<E, E, f32>::new(16usize, 8usize, 16usize);
    let row = &values[at..at + 1];
    let fragments = instruction.load_matrix::<Vector<E, N>, Const<2>>(row, operand, 4usize, transposed);
    let mut registers = Sequence::<u32>::new();
    #[unroll]
    for i in 0..4usize {
        registers.push(u32::reinterpret(fragments[i]));
    }
    registers
}
