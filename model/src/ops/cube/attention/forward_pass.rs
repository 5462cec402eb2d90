//! The forward kernel: each cube holds a tile of queries and loops over tiles of keys and values.

use core::f32::consts::LOG2_E;

use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::super::sums::Reduction;
use super::fragments::keep_rows;
use super::product::{accumulate, publish, score};
use super::stage::{
    after_stage, arrive, before_stage, exp2, filled, reduce_rows, stage, stage_of, write_rows,
};
use super::tile::{Tile, is_before, lane, row_of};

/// The score of a masked column. Unlike infinity, subtracting it from itself does not give NaN.
pub(super) const MASKED: f32 = -1e30;
/// The initial running maximum with a window: above [`MASKED`], so that a tile without visible columns has weights
/// of 0, and below every real score.
const NONE_SEEN: f32 = -1e27;

/// Sizes of a launch.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Sizes {
    /// Rows of queries.
    pub seq: u32,
    /// Filled rows of keys.
    pub keys: u32,
    /// Allocated rows of keys.
    pub capacity: u32,
    pub heads: u32,
    pub kv_heads: u32,
    pub scale: f32,
}

/// Returns the index of a head's first row, in rows of one head; a head's rows are `heads` apart.
#[cube]
pub(super) fn head_start(batch: u32, rows: u32, heads: u32, head: u32) -> usize {
    batch as usize * rows as usize * heads as usize + head as usize
}

#[cube]
pub(super) fn from_last(index: u32, count: u32) -> u32 {
    count - 1 - index
}

/// Returns the first tile of columns to which query `first` or a later one attends, after `before` earlier keys.
#[cube]
pub(super) fn first_step(
    first: u32,
    before: u32,
    #[comptime] window: Option<u32>,
    #[comptime] tile: Tile,
) -> u32 {
    if comptime!(window.is_some()) {
        let past = first + before + 1;
        (past - min(past, comptime!(window.unwrap_or_default()))) / comptime!(tile.columns as u32)
    } else {
        0u32.runtime()
    }
}

/// Computes attention, and the logarithms of the rows' sums.
///
/// Cubes: heads; batch; tiles of queries, beginning with the last because it has the most work.
#[cube(launch_unchecked)]
pub(super) fn forward_kernel<E: Float, N: Size, O: Size>(
    q: &[Vector<E, N>],
    k: &[Vector<E, N>],
    v: &[Vector<E, N>],
    out: &mut [Vector<E, O>],
    lse: &mut [f32],
    sizes: &Sizes,
    #[comptime] tile: Tile,
    #[comptime] window: Option<u32>,
    #[define(E)] _elem: ElemType,
    #[define(N, O)] _vectors: [usize; 2],
) {
    let per_row = comptime!(tile.columns_per_unit());
    let owned = comptime!(tile.rows_per_unit);
    let values = comptime!(tile.values_per_unit() / tile.rows_per_unit);
    let width = comptime!(tile.row_vectors());
    let stage_vectors = comptime!(tile.stages * tile.columns * tile.stride());
    let alignment = comptime!(tile.alignment());

    let mut rows =
        Shared::<[Vector<E, N>]>::new_aligned_slice(comptime!(tile.rows * tile.stride()), alignment);
    let mut keys = Shared::<[Vector<E, N>]>::new_aligned_slice(stage_vectors, alignment);
    let mut vals = Shared::<[Vector<E, N>]>::new_aligned_slice(stage_vectors, alignment);
    let mut published = Shared::<[f32]>::new_slice(comptime!(tile.published(1)));
    let mut partials = Shared::<[f32]>::new_slice(comptime!(tile.partials()));

    let head = CUBE_POS_X;
    let batch = CUBE_POS_Y;
    let first = from_last(CUBE_POS_Z, CUBE_COUNT_Z) * comptime!(tile.rows as u32);
    let before = sizes.keys - sizes.seq;
    let kv_head = head / (sizes.heads / sizes.kv_heads);
    // The end of the keys to which the last query attends.
    let end = min(first + comptime!(tile.rows as u32), sizes.seq) + before;
    let begin = first_step(first, before, window, tile);
    let steps = end.div_ceil(comptime!(tile.columns as u32));

    let q_start = head_start(batch, sizes.seq, sizes.heads, head) + first as usize * sizes.heads as usize;
    let q_pitch = sizes.heads as usize * width;
    let kv_start = head_start(batch, sizes.capacity, sizes.kv_heads, kv_head) * width;
    let kv_pitch = sizes.kv_heads as usize * width;
    let valid = sizes.seq - first;

    stage::<E, N>(q, q_start * width, q_pitch, valid, &mut rows, 0usize, comptime!(tile.rows), tile);
    if comptime!(tile.asynchronous()) {
        stage_columns::<E, N>(k, v, &mut keys, &mut vals, kv_start, kv_pitch, begin, sizes.keys, begin, tile);
    }

    let factor = sizes.scale * comptime!(LOG2_E);
    let mut scores = Array::<f32>::new(comptime!(tile.scores_per_unit()));
    let mut sums = filled(0.0f32, comptime!(tile.values_per_unit()));
    let mut top = filled(comptime!(if window.is_some() { NONE_SEEN } else { MASKED }), owned);
    let mut total = filled(0.0f32, owned);

    arrive(tile);
    let kept = keep_rows::<E, N>(&rows, tile);
    // Rows attend to all columns of the steps before `seen`, most of the work: a loop without masks.
    let parts = comptime!(if window.is_some() || tile.publishes() { 1 } else { 2 });
    let seen = if comptime!(parts == 2) {
        min((first + before + 1) / comptime!(tile.columns as u32), steps)
    } else {
        begin
    };
    #[unroll]
    for part in 0..parts {
        let is_masked = comptime!(part + 1 == parts);
        let from_step = if comptime!(part == 0) { begin } else { seen };
        let to_step = if is_masked { steps } else { seen };
        for step in from_step..to_step {
            let column = step * comptime!(tile.columns as u32);
            let from = stage_of(step, tile);
            before_stage(tile);
            let next = step + comptime!(tile.ahead());
            if next < steps {
                stage_columns::<E, N>(
                    k, v, &mut keys, &mut vals, kv_start, kv_pitch, next, sizes.keys, next, tile,
                );
            }
            after_stage(tile);
            score::<E, N>(&mut scores, &rows, &kept, &keys, from, tile);
            if is_masked {
                if column + comptime!(tile.columns as u32) > first + before + 1 {
                    mask_future(&mut scores, first + before, column, tile);
                }
                mask_past(&mut scores, first, before, column, window, tile);
            }

            let mut tops = Array::<f32>::new(owned);
            #[unroll]
            for r in 0..owned {
                let mut value = top[r];
                #[unroll]
                for c in 0..per_row {
                    value = max(value, scores[comptime!(r * per_row + c)]);
                }
                tops[r] = value;
            }
            reduce_rows(&mut tops, &mut partials, Reduction::Max, tile);
            #[unroll]
            for r in 0..owned {
                let shrink = exp2((top[r] - tops[r]) * factor, tile);
                top[r] = tops[r];
                let shift = tops[r] * factor;
                let mut sum = total[r] * shrink;
                #[unroll]
                for c in 0..per_row {
                    let at = comptime!(r * per_row + c);
                    let weight = exp2(scores[at] * factor - shift, tile);
                    scores[at] = weight;
                    sum += weight;
                }
                total[r] = sum;
                #[unroll]
                for i in 0..values {
                    sums[comptime!(r * values + i)] *= shrink;
                }
            }
            publish(&scores, &mut published, 0usize, tile);
            if comptime!(tile.publishes()) {
                sync_cube();
            }
            accumulate::<E, N>(&mut sums, &scores, &published, 0usize, &vals, from, tile);
        }
    }

    reduce_rows(&mut total, &mut partials, Reduction::Sum, tile);
    let mut scale = Array::<f32>::new(owned);
    #[unroll]
    for r in 0..owned {
        scale[r] = 1.0f32 / total[r];
        let row = row_of(r, tile);
        if row < valid && lane(tile) == 0 {
            lse[q_start + row as usize * sizes.heads as usize] = top[r] * sizes.scale + total[r].ln();
        }
    }
    let run_width = comptime!(tile.head_dim / tile.run());
    let pitch = sizes.heads as usize * run_width;
    write_rows::<E, O>(&sums, &scale, out, q_start * run_width, pitch, valid, tile);
}

/// Stages tile `begin` of the columns of two tensors, for a head of `rows` rows that begins at `start`.
#[cube]
pub(super) fn stage_columns<E: Float, N: Size>(
    a: &[Vector<E, N>],
    b: &[Vector<E, N>],
    to_a: &mut Shared<[Vector<E, N>]>,
    to_b: &mut Shared<[Vector<E, N>]>,
    start: usize,
    pitch: usize,
    begin: u32,
    rows: u32,
    step: u32,
    #[comptime] tile: Tile,
) {
    let n = comptime!(tile.columns);
    let first = begin * comptime!(n as u32);
    let from = start + first as usize * pitch;
    let to = stage_of(step, tile);
    stage::<E, N>(a, from, pitch, rows - first, to_a, to, n, tile);
    stage::<E, N>(b, from, pitch, rows - first, to_b, to, n, tile);
}

/// Masks keys before the query's window, for queries from `first` on, after `before` earlier keys, and keys from
/// `column` on.
#[cube]
pub(super) fn mask_past(
    scores: &mut Array<f32>,
    first: u32,
    before: u32,
    column: u32,
    #[comptime] window: Option<u32>,
    #[comptime] tile: Tile,
) {
    if comptime!(window.is_some()) {
        let window = comptime!(window.unwrap_or_default());
        let first = first + before;
        if first + comptime!(tile.rows as u32) > column + window {
            let per_row = comptime!(tile.columns_per_unit());
            #[unroll]
            for r in 0..comptime!(tile.rows_per_unit) {
                let position = first + row_of(r, tile);
                #[unroll]
                for c in 0..per_row {
                    let at = comptime!(r * per_row + c);
                    let seen = !is_before(c, position + 1, column + window, tile);
                    scores[at] = select(seen, scores[at], comptime!(MASKED));
                }
            }
        }
    }
}

/// Masks keys after the query, for queries from `first` on and keys from `column` on.
#[cube]
pub(super) fn mask_future(scores: &mut Array<f32>, first: u32, column: u32, #[comptime] tile: Tile) {
    let per_row = comptime!(tile.columns_per_unit());
    #[unroll]
    for r in 0..comptime!(tile.rows_per_unit) {
        let position = first + row_of(r, tile);
        #[unroll]
        for c in 0..per_row {
            let at = comptime!(r * per_row + c);
            let seen = is_before(c, position + 1, column, tile);
            scores[at] = select(seen, scores[at], comptime!(MASKED));
        }
    }
}
