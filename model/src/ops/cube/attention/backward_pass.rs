//! The backward kernels: one for queries, one for keys. Both recompute the scores, and sum in a fixed order.

use core::f32::consts::LOG2_E;

use cubecl::ir::ElemType;
use cubecl::prelude::barrier::copy_async_checked;
use cubecl::prelude::*;

use super::super::sums::Reduction;
use super::forward_pass::{
    MASKED, Sizes, first_step, from_last, head_start, mask_future, mask_past, stage_columns,
};
use super::fragments::keep_rows;
use super::product::{accumulate, publish, score};
use super::stage::{
    after_stage, arrive, before_stage, exp2, filled, reduce_rows, stage, stage_of, write_rows,
};
use super::tile::{Tile, column_of, is_before, lane, row_of};

/// Computes `dQ = dS · K`, and `delta = rowsum(dO ∘ O)`, which [`keys_kernel`] reads, on the grid of `forward_kernel`.
#[cube(launch_unchecked)]
pub(super) fn queries_kernel<E: Float, N: Size, O: Size>(
    q: &[Vector<E, N>],
    k: &[Vector<E, N>],
    v: &[Vector<E, N>],
    out: &[Vector<E, N>],
    dout: &[Vector<E, N>],
    lse: &[f32],
    delta: &mut [f32],
    dq: &mut [Vector<E, O>],
    sizes: &Sizes,
    #[comptime] tile: Tile,
    #[comptime] window: Option<u32>,
    #[define(E)] _elem: ElemType,
    #[define(N, O)] _vectors: [usize; 2],
) {
    let per_row = comptime!(tile.columns_per_unit());
    let owned = comptime!(tile.rows_per_unit);
    let width = comptime!(tile.row_vectors());
    let row_vectors = comptime!(tile.rows * tile.stride());
    let stage_vectors = comptime!(tile.stages * tile.columns * tile.stride());
    let alignment = comptime!(tile.alignment());

    let mut queries = Shared::<[Vector<E, N>]>::new_aligned_slice(row_vectors, alignment);
    let mut gradients = Shared::<[Vector<E, N>]>::new_aligned_slice(row_vectors, alignment);
    let mut keys = Shared::<[Vector<E, N>]>::new_aligned_slice(stage_vectors, alignment);
    let mut vals = Shared::<[Vector<E, N>]>::new_aligned_slice(stage_vectors, alignment);
    let mut published = Shared::<[f32]>::new_slice(comptime!(tile.published(1)));
    let mut partials = Shared::<[f32]>::new_slice(comptime!(tile.partials()));

    let head = CUBE_POS_X;
    let batch = CUBE_POS_Y;
    let first = from_last(CUBE_POS_Z, CUBE_COUNT_Z) * comptime!(tile.rows as u32);
    let kv_head = head / (sizes.heads / sizes.kv_heads);
    let end = min(first + comptime!(tile.rows as u32), sizes.seq);
    let begin = first_step(first, 0u32, window, tile);
    let steps = end.div_ceil(comptime!(tile.columns as u32));

    let start = head_start(batch, sizes.seq, sizes.heads, head) + first as usize * sizes.heads as usize;
    let pitch = sizes.heads as usize * width;
    let kv_start = head_start(batch, sizes.keys, sizes.kv_heads, kv_head) * width;
    let kv_pitch = sizes.kv_heads as usize * width;
    let valid = sizes.seq - first;

    let n = comptime!(tile.rows);
    stage::<E, N>(q, start * width, pitch, valid, &mut queries, 0usize, n, tile);
    stage::<E, N>(dout, start * width, pitch, valid, &mut gradients, 0usize, n, tile);
    if comptime!(tile.asynchronous()) {
        stage_columns::<E, N>(k, v, &mut keys, &mut vals, kv_start, kv_pitch, begin, sizes.keys, begin, tile);
    }

    let factor = sizes.scale * comptime!(LOG2_E);
    let mut mean = Array::<f32>::new(owned);
    #[unroll]
    for r in 0..owned {
        let row = min(row_of(r, tile), valid - 1);
        let at = start + row as usize * sizes.heads as usize;
        mean[r] = share_of_product::<E, N>(out, dout, at * width, tile);
    }
    reduce_rows(&mut mean, &mut partials, Reduction::Sum, tile);
    let mut shift = Array::<f32>::new(owned);
    #[unroll]
    for r in 0..owned {
        let row = row_of(r, tile);
        let at = start + min(row, valid - 1) as usize * sizes.heads as usize;
        shift[r] = lse[at] * comptime!(LOG2_E);
        if row < valid && lane(tile) == 0 {
            delta[at] = mean[r];
        }
    }
    let mut scores = Array::<f32>::new(comptime!(tile.scores_per_unit()));
    let mut slopes = Array::<f32>::new(comptime!(tile.scores_per_unit()));
    let mut sums = filled(0.0f32, comptime!(tile.values_per_unit()));

    arrive(tile);
    let kept_queries = keep_rows::<E, N>(&queries, tile);
    let kept_gradients = keep_rows::<E, N>(&gradients, tile);
    for step in begin..steps {
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
        score::<E, N>(&mut scores, &queries, &kept_queries, &keys, from, tile);
        if column + comptime!(tile.columns as u32) > first + 1 {
            mask_future(&mut scores, first, column, tile);
        }
        mask_past(&mut scores, first, 0u32, column, window, tile);
        score::<E, N>(&mut slopes, &gradients, &kept_gradients, &vals, from, tile);
        #[unroll]
        for r in 0..owned {
            #[unroll]
            for c in 0..per_row {
                let at = comptime!(r * per_row + c);
                let weight = exp2(scores[at] * factor - shift[r], tile);
                slopes[at] = weight * (slopes[at] - mean[r]);
            }
        }
        publish(&slopes, &mut published, 0usize, tile);
        if comptime!(tile.publishes()) {
            sync_cube();
        }
        accumulate::<E, N>(&mut sums, &slopes, &published, 0usize, &keys, from, tile);
    }

    let scale = filled(sizes.scale, owned);
    let run_width = comptime!(tile.head_dim / tile.run());
    let pitch = sizes.heads as usize * run_width;
    write_rows::<E, O>(&sums, &scale, dq, start * run_width, pitch, valid, tile);
}

/// Returns this unit's part of the dot product of two rows that begin at vector `first`.
#[cube]
fn share_of_product<E: Float, N: Size>(
    a: &[Vector<E, N>],
    b: &[Vector<E, N>],
    first: usize,
    #[comptime] tile: Tile,
) -> f32 {
    let mut sum = 0.0f32;
    #[unroll]
    for step in 0..comptime!(tile.row_vectors().div_ceil(tile.lanes())) {
        let v = lane(tile) as usize + comptime!(step * tile.lanes());
        if v < comptime!(tile.row_vectors()) {
            let at = first + v;
            let products = Vector::<f32, N>::cast_from(a[at]) * Vector::<f32, N>::cast_from(b[at]);
            #[unroll]
            for w in 0..comptime!(tile.vector()) {
                sum += products.extract(w);
            }
        }
    }
    sum
}

/// Computes `dV = Pᵀ · dO` and `dK = dSᵀ · Q`, on transposed scores: rows are keys.
///
/// Cubes: key heads times shares of their query heads; batch; tiles of keys, of which the first has the most work.
/// Each share has its own head in the gradients, see [`shares`](super::shares).
#[cube(launch_unchecked)]
pub(super) fn keys_kernel<E: Float, G: Float, N: Size, O: Size>(
    q: &[Vector<E, N>],
    k: &[Vector<E, N>],
    v: &[Vector<E, N>],
    dout: &[Vector<E, N>],
    lse: &[f32],
    delta: &[f32],
    dk: &mut [Vector<G, O>],
    dv: &mut [Vector<G, O>],
    sizes: &Sizes,
    #[comptime] tile: Tile,
    #[comptime] window: Option<u32>,
    #[define(E, G)] _elems: [ElemType; 2],
    #[define(N, O)] _vectors: [usize; 2],
) {
    let per_row = comptime!(tile.columns_per_unit());
    let owned = comptime!(tile.rows_per_unit);
    let columns = comptime!(tile.columns as u32);
    let width = comptime!(tile.row_vectors());
    let row_vectors = comptime!(tile.rows * tile.stride());
    let stage_vectors = comptime!(tile.stages * tile.columns * tile.stride());
    let alignment = comptime!(tile.alignment());
    let product = comptime!(tile.published(1));

    let mut keys = Shared::<[Vector<E, N>]>::new_aligned_slice(row_vectors, alignment);
    let mut vals = Shared::<[Vector<E, N>]>::new_aligned_slice(row_vectors, alignment);
    let mut queries = Shared::<[Vector<E, N>]>::new_aligned_slice(stage_vectors, alignment);
    let mut gradients = Shared::<[Vector<E, N>]>::new_aligned_slice(stage_vectors, alignment);
    let mut shifts = Shared::<[f32]>::new_aligned_slice(comptime!(tile.stages * tile.columns), 16usize);
    let mut means = Shared::<[f32]>::new_aligned_slice(comptime!(tile.stages * tile.columns), 16usize);
    let mut published = Shared::<[f32]>::new_slice(comptime!(tile.published(2)));

    let (share, shares) = (CUBE_POS_X, CUBE_COUNT_X);
    let kv_head = share / (shares / sizes.kv_heads);
    let batch = CUBE_POS_Y;
    let first = CUBE_POS_Z * comptime!(tile.rows as u32);
    let group = sizes.heads / shares;
    // For each head, the tiles of queries that attend to any of these keys.
    let skipped = first / columns;
    let per_head = past_last_query(first, sizes.seq, window, tile).div_ceil(columns) - skipped;
    let steps = group * per_head;

    let start =
        head_start(batch, sizes.keys, sizes.kv_heads, kv_head) + first as usize * sizes.kv_heads as usize;
    let pitch = sizes.kv_heads as usize * width;
    let valid = sizes.keys - first;
    let q_start = head_start(batch, sizes.seq, sizes.heads, share * group);
    let q_pitch = sizes.heads as usize * width;

    let n = comptime!(tile.rows);
    stage::<E, N>(k, start * width, pitch, valid, &mut keys, 0usize, n, tile);
    stage::<E, N>(v, start * width, pitch, valid, &mut vals, 0usize, n, tile);
    if comptime!(tile.asynchronous()) {
        let (start, rows) = (q_start * width, sizes.seq);
        stage_columns::<E, N>(
            q,
            dout,
            &mut queries,
            &mut gradients,
            start,
            q_pitch,
            skipped,
            rows,
            0u32,
            tile,
        );
        stage_of_rows(lse, delta, &mut shifts, &mut means, q_start, skipped, sizes, 0u32, tile);
    }

    let factor = sizes.scale * comptime!(LOG2_E);
    let mut scores = Array::<f32>::new(comptime!(tile.scores_per_unit()));
    let mut slopes = Array::<f32>::new(comptime!(tile.scores_per_unit()));
    let mut key_sums = filled(0.0f32, comptime!(tile.values_per_unit()));
    let mut val_sums = filled(0.0f32, comptime!(tile.values_per_unit()));

    arrive(tile);
    let kept_keys = keep_rows::<E, N>(&keys, tile);
    let kept_vals = keep_rows::<E, N>(&vals, tile);
    for step in 0..steps {
        let column = (skipped + step % per_head) * columns;
        let from = stage_of(step, tile);
        before_stage(tile);
        let next = step + comptime!(tile.ahead());
        if next < steps {
            let head_q = q_start + (next / per_head) as usize;
            let begin = skipped + next % per_head;
            let (start, rows) = (head_q * width, sizes.seq);
            stage_columns::<E, N>(
                q,
                dout,
                &mut queries,
                &mut gradients,
                start,
                q_pitch,
                begin,
                rows,
                next,
                tile,
            );
            stage_of_rows(lse, delta, &mut shifts, &mut means, head_q, begin, sizes, next, tile);
        }
        after_stage(tile);

        score::<E, N>(&mut scores, &keys, &kept_keys, &queries, from, tile);
        let end = column + columns;
        if column < first + comptime!(tile.rows as u32) - 1 || end > sizes.seq {
            hide_earlier(&mut scores, first, column, sizes.seq, tile);
        }
        hide_later(&mut scores, first, column, window, tile);
        score::<E, N>(&mut slopes, &vals, &kept_vals, &gradients, from, tile);
        #[unroll]
        for c in 0..per_row {
            let query = from + column_of(c, tile) as usize;
            let shift = shifts[query] * comptime!(LOG2_E);
            let mean = means[query];
            #[unroll]
            for r in 0..owned {
                let at = comptime!(r * per_row + c);
                let weight = exp2(scores[at] * factor - shift, tile);
                scores[at] = weight;
                slopes[at] = weight * (slopes[at] - mean);
            }
        }
        publish(&scores, &mut published, 0usize, tile);
        publish(&slopes, &mut published, product, tile);
        if comptime!(tile.publishes()) {
            sync_cube();
        }
        accumulate::<E, N>(&mut val_sums, &scores, &published, 0usize, &gradients, from, tile);
        accumulate::<E, N>(&mut key_sums, &slopes, &published, product, &queries, from, tile);
    }

    let scale = filled(sizes.scale, owned);
    let one = filled(1.0f32, owned);
    let run_width = comptime!(tile.head_dim / tile.run());
    let pitch = shares as usize * run_width;
    let start = head_start(batch, sizes.keys, shares, share) * run_width + first as usize * pitch;
    write_rows::<G, O>(&key_sums, &scale, dk, start, pitch, valid, tile);
    write_rows::<G, O>(&val_sums, &one, dv, start, pitch, valid, tile);
}

/// Stages two values per query for a tile of queries of the head that begins at `start`.
#[cube]
fn stage_of_rows(
    a: &[f32],
    b: &[f32],
    to_a: &mut Shared<[f32]>,
    to_b: &mut Shared<[f32]>,
    start: usize,
    begin: u32,
    sizes: &Sizes,
    step: u32,
    #[comptime] tile: Tile,
) {
    let columns = comptime!(tile.columns as u32);
    if UNIT_POS < columns {
        let row = begin * columns + UNIT_POS;
        let to = stage_of(step, tile) + UNIT_POS as usize;
        let there = row < sizes.seq;
        let from = select(there, start + row as usize * sizes.heads as usize, start);
        if comptime!(tile.asynchronous()) {
            let len = select(there, 1usize, 0usize);
            copy_async_checked(&a[from..from + len], &mut to_a[to..to + 1], 1u32);
            copy_async_checked(&b[from..from + len], &mut to_b[to..to + 1], 1u32);
        } else {
            to_a[to] = a[from];
            to_b[to] = b[from];
        }
    }
}

/// Returns the end of the queries that attend to any key of the tile that begins at row `first`.
#[cube]
fn past_last_query(first: u32, seq: u32, #[comptime] window: Option<u32>, #[comptime] tile: Tile) -> u32 {
    if comptime!(window.is_some()) {
        min(first + comptime!(tile.rows as u32 - 1 + window.unwrap_or_default()), seq)
    } else {
        seq
    }
}

/// Masks queries whose window begins after the key, for keys from `first` on and queries from `column` on.
#[cube]
fn hide_later(
    scores: &mut Array<f32>,
    first: u32,
    column: u32,
    #[comptime] window: Option<u32>,
    #[comptime] tile: Tile,
) {
    if comptime!(window.is_some()) {
        let window = comptime!(window.unwrap_or_default());
        if column + comptime!(tile.columns as u32) > first + window {
            let per_row = comptime!(tile.columns_per_unit());
            #[unroll]
            for r in 0..comptime!(tile.rows_per_unit) {
                let past = first + row_of(r, tile) + window;
                #[unroll]
                for c in 0..per_row {
                    let at = comptime!(r * per_row + c);
                    let seen = is_before(c, past, column, tile);
                    scores[at] = select(seen, scores[at], comptime!(MASKED));
                }
            }
        }
    }
}

/// Masks queries before the key or past the end, for keys from `first` on and queries from `column` on.
#[cube]
fn hide_earlier(scores: &mut Array<f32>, first: u32, column: u32, seq: u32, #[comptime] tile: Tile) {
    let per_row = comptime!(tile.columns_per_unit());
    #[unroll]
    for r in 0..comptime!(tile.rows_per_unit) {
        let position = first + row_of(r, tile);
        #[unroll]
        for c in 0..per_row {
            let at = comptime!(r * per_row + c);
            let seen = !is_before(c, position, column, tile) && is_before(c, seq, column, tile);
            scores[at] = select(seen, scores[at], comptime!(MASKED));
        }
    }
}
