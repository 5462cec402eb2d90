//! Copies between global and shared memory, and reductions over the units that share a row.

use cubecl::prelude::barrier::copy_async_checked;
use cubecl::prelude::*;

use super::super::sums::Reduction;
use super::tile::{Instructions, Tile, lane, row_of, run_of};

const PANEL_VECTORS: usize = 8;

/// Copies `count` rows, `pitch` vectors apart from vector `first` on, to shared memory from row `to` on. Rows from
/// `valid` on become zero. Asynchronous copies have arrived after the next [`before_stage`] or [`arrive`].
#[cube]
pub(super) fn stage<E: Float, N: Size>(
    source: &[Vector<E, N>],
    first: usize,
    pitch: usize,
    valid: u32,
    destination: &mut Shared<[Vector<E, N>]>,
    to: usize,
    #[comptime] count: usize,
    #[comptime] tile: Tile,
) {
    let width = comptime!(tile.row_vectors());
    let vectors = comptime!(count * width);
    let units = comptime!(tile.units());
    if comptime!(tile.asynchronous()) {
        let skip = comptime!(units / width);
        let (row, column) = (UNIT_POS as usize / width, UNIT_POS as usize % width);
        #[unroll]
        for step in 0..comptime!(vectors / units) {
            let row = row + comptime!(step * skip);
            let there = (row as u32) < valid;
            // Even a copy of no elements needs a valid address.
            let from = select(there, first + row * pitch + column, first);
            let len = select(there, 1usize, 0usize);
            let at = place_of(to, row, column, count, tile);
            copy_async_checked(
                &source[from..from + len],
                &mut destination[at..at + 1],
                comptime!(tile.vector() as u32),
            );
        }
    } else {
        let mut index = UNIT_POS as usize;
        while index < vectors {
            let (row, column) = (index / width, index % width);
            let at = place_of(to, row, column, count, tile);
            if (row as u32) < valid {
                destination[at] = source[first + row * pitch + column];
            } else {
                destination[at] = Vector::zeroed();
            }
            index += units;
        }
    }
}

/// Returns the position in shared memory of vector `column` of row `row`, of `count` rows stored from row `to` on.
///
/// `wgmma` reads the layout of a 128-byte swizzle (PTX ISA, "Asynchronous warpgroup level matrix instructions"): rows
/// lie in *panels* of 64 values. In a panel, vector `i` of row `r` is at position `i ^ (r % 8)`, which avoids bank
/// conflicts.
#[cube]
pub(super) fn place_of(
    to: usize,
    row: usize,
    column: usize,
    #[comptime] count: usize,
    #[comptime] tile: Tile,
) -> usize {
    match comptime!(tile.instructions) {
        Instructions::Wgmma => {
            let panel = column / PANEL_VECTORS * comptime!(count * PANEL_VECTORS);
            let permuted = (column % PANEL_VECTORS) ^ (row % PANEL_VECTORS);
            to * comptime!(tile.stride()) + panel + row * PANEL_VECTORS + permuted
        }
        Instructions::Mma | Instructions::Fma => (to + row) * comptime!(tile.stride()) + column,
    }
}

#[cube]
pub(super) fn stage_of(step: u32, #[comptime] tile: Tile) -> usize {
    if comptime!(tile.asynchronous()) {
        (step % comptime!(tile.stages as u32)) as usize * comptime!(tile.columns)
    } else {
        0usize.runtime()
    }
}

/// Waits for staged rows. Call it before reading rows into registers that keep them for all steps.
#[cube]
pub(super) fn arrive(#[comptime] tile: Tile) {
    if comptime!(tile.keeps_rows) {
        gpu_asm!("cp.async.wait_all;");
        sync_cube();
    }
}

/// Synchronizes the cube before columns are staged, so that no unit still reads the columns to be overwritten. With
/// an asynchronous tile, this step's columns have also arrived.
#[cube]
pub(super) fn before_stage(#[comptime] tile: Tile) {
    if comptime!(tile.asynchronous()) {
        gpu_asm!("cp.async.wait_all;");
        if comptime!(tile.instructions == Instructions::Wgmma) {
            // Without a fence between proxies, `wgmma` does not see the writes of other instructions.
            gpu_asm!("fence.proxy.async.shared::cta;");
        }
    }
    sync_cube();
}

/// Waits for this step's columns. Must be called after columns have been staged.
#[cube]
pub(super) fn after_stage(#[comptime] tile: Tile) {
    if comptime!(!tile.asynchronous()) {
        sync_cube();
    }
}

/// Writes this unit's rows, times `scale`, to global memory from vector `first` on. Skips rows from `valid` on.
#[cube]
pub(super) fn write_rows<E: Float, O: Size>(
    values: &Array<f32>,
    scale: &Array<f32>,
    destination: &mut [Vector<E, O>],
    first: usize,
    pitch: usize,
    valid: u32,
    #[comptime] tile: Tile,
) {
    let runs = comptime!(tile.runs_per_unit());
    let run = comptime!(tile.run());
    #[unroll]
    for r in 0..comptime!(tile.rows_per_unit) {
        let row = row_of(r, tile);
        if row < valid {
            #[unroll]
            for v in 0..runs {
                let at = run_of(v, tile);
                let mut vector = Vector::<E, O>::empty();
                #[unroll]
                for w in 0..run {
                    let value = values[comptime!((r * runs + v) * run + w)];
                    vector.insert(w, E::cast_from(value * scale[r]));
                }
                if comptime!(tile.runs_past()) {
                    if at < comptime!((tile.head_dim / run) as u32) {
                        destination[first + row as usize * pitch + at as usize] = vector;
                    }
                } else {
                    destination[first + row as usize * pitch + at as usize] = vector;
                }
            }
        }
    }
}

/// Reduces each row to its maximum or sum, over the units that share the row.
#[cube]
pub(super) fn reduce_rows(
    values: &mut Array<f32>,
    partials: &mut Shared<[f32]>,
    #[comptime] reduction: Reduction,
    #[comptime] tile: Tile,
) {
    match comptime!(tile.instructions) {
        Instructions::Wgmma | Instructions::Mma =>
        {
            #[unroll]
            for r in 0..comptime!(tile.rows_per_unit) {
                let value = values[r];
                let value = combine(value, plane_shuffle_xor(value, 1u32), reduction);
                values[r] = combine(value, plane_shuffle_xor(value, 2u32), reduction);
            }
        }
        Instructions::Fma => {
            #[unroll]
            for r in 0..comptime!(tile.rows_per_unit) {
                let at = row_of(r, tile) as usize * comptime!(tile.lanes()) + lane(tile) as usize;
                partials[at] = values[r];
            }
            sync_cube();
            #[unroll]
            for r in 0..comptime!(tile.rows_per_unit) {
                let first = row_of(r, tile) as usize * comptime!(tile.lanes());
                let mut value = partials[first];
                #[unroll]
                for i in 1..comptime!(tile.lanes()) {
                    value = combine(value, partials[first + i], reduction);
                }
                values[r] = value;
            }
        }
    }
}

#[cube]
fn combine(a: f32, b: f32, #[comptime] reduction: Reduction) -> f32 {
    match comptime!(reduction) {
        Reduction::Max => max(a, b),
        Reduction::Sum => a + b,
    }
}

#[cube]
pub(super) fn filled(value: f32, #[comptime] len: usize) -> Array<f32> {
    let mut array = Array::<f32>::new(len);
    #[unroll]
    for i in 0..len {
        array[i] = value;
    }
    array
}

/// Computes `2^x`, to a few units in the last place.
#[cube]
pub(super) fn exp2(x: f32, #[comptime] tile: Tile) -> f32 {
    if comptime!(tile.instructions != Instructions::Fma) {
        let result: f32;
        gpu_asm!("ex2.approx.ftz.f32 {}, {};", out(_) result, in(_) x, options(pure, nomem));
        result
    } else {
        (x * comptime!(core::f32::consts::LN_2)).exp()
    }
}
