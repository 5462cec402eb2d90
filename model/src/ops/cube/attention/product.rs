//! The two products of tiles that make up attention.

use cubecl::cmma::MatrixIdent;
use cubecl::prelude::*;

use super::fragments::load;
use super::tile::{Instructions, Tile, column_of, row_of, run_of};
use super::warpgroup::{accumulate_wgmma, score_wgmma};

/// Computes `scores = rows · columnsᵀ`, in shared memory, for `columns` from row `from` on. `kept` are the rows in
/// registers, from [`keep_rows`](super::fragments::keep_rows).
#[cube]
pub(super) fn score<E: Float, N: Size>(
    scores: &mut Array<f32>,
    rows: &Shared<[Vector<E, N>]>,
    kept: &Array<u32>,
    columns: &Shared<[Vector<E, N>]>,
    from: usize,
    #[comptime] tile: Tile,
) {
    #[unroll]
    for i in 0..comptime!(tile.scores_per_unit()) {
        scores[i] = 0.0f32;
    }
    match comptime!(tile.instructions) {
        Instructions::Wgmma => score_wgmma::<E, N>(scores, rows, kept, columns, from, tile),
        Instructions::Mma => score_mma::<E, N>(scores, rows, columns, from, tile),
        Instructions::Fma => score_fma::<E, N>(scores, rows, columns, from, tile),
    }
}

/// Computes `out += product · columns` for a tile of scores, and `columns` in shared memory from row `from` on.
///
/// Without tensor cores, reads the product from `published`, where [`publish`] has written it from `at` on.
#[cube]
pub(super) fn accumulate<E: Float, N: Size>(
    out: &mut Array<f32>,
    product: &Array<f32>,
    published: &Shared<[f32]>,
    at: usize,
    columns: &Shared<[Vector<E, N>]>,
    from: usize,
    #[comptime] tile: Tile,
) {
    match comptime!(tile.instructions) {
        Instructions::Wgmma => accumulate_wgmma::<E, N>(out, product, columns, from, tile),
        Instructions::Mma => accumulate_mma::<E, N>(out, product, columns, from, tile),
        Instructions::Fma => accumulate_fma::<E, N>(out, published, at, columns, from, tile),
    }
}

/// Writes a product to shared memory for [`accumulate`], if the instructions read it there. Needs a barrier before
/// reads.
#[cube]
pub(super) fn publish(
    product: &Array<f32>,
    published: &mut Shared<[f32]>,
    at: usize,
    #[comptime] tile: Tile,
) {
    if comptime!(tile.publishes()) {
        let columns = comptime!(tile.columns_per_unit());
        #[unroll]
        for r in 0..comptime!(tile.rows_per_unit) {
            let row = at + row_of(r, tile) as usize * comptime!(tile.columns);
            #[unroll]
            for c in 0..columns {
                published[row + column_of(c, tile) as usize] = product[comptime!(r * columns + c)];
            }
        }
    }
}

#[cube]
fn score_mma<E: Float, N: Size>(
    scores: &mut Array<f32>,
    rows: &Shared<[Vector<E, N>]>,
    columns: &Shared<[Vector<E, N>]>,
    from: usize,
    #[comptime] tile: Tile,
) {
    let stride = comptime!(tile.stride());
    let per_row = comptime!(tile.columns_per_unit());
    let strips = comptime!(tile.rows_per_unit / 2);
    let (plane, unit) = (UNIT_POS as usize / 32, UNIT_POS as usize % 32);
    // Four matrices of 8 × 8 are read at once; for each, eight units provide the addresses of its rows. Rows: upper
    // and lower half of the left 8 values, then of the right 8. Columns: left and right 8 values of the first 8
    // columns, then of the next.
    let row = (plane * comptime!(8 * tile.rows_per_unit) + unit % 16) * stride + unit / 16;
    let column = (from + unit % 8 + unit / 16 * 8) * stride + unit / 8 % 2;
    #[unroll]
    for k in 0..comptime!(tile.head_dim / 16) {
        let mut left = Sequence::<Sequence<u32>>::new();
        #[unroll]
        for strip in 0..strips {
            let begin = row + comptime!(strip * 16 * stride + 2 * k);
            left.push(load::<E, N>(rows, begin, MatrixIdent::A, false));
        }
        #[unroll]
        for pair in 0..comptime!(tile.columns / 16) {
            let begin = column + comptime!(pair * 16 * stride + 2 * k);
            let right = load::<E, N>(columns, begin, MatrixIdent::B, false);
            #[unroll]
            for strip in 0..strips {
                let at = comptime!(strip * 2 * per_row + pair * 4);
                multiply(scores, left.index(strip), &right, at, per_row, tile);
            }
        }
    }
}

#[cube]
fn accumulate_mma<E: Float, N: Size>(
    out: &mut Array<f32>,
    product: &Array<f32>,
    columns: &Shared<[Vector<E, N>]>,
    from: usize,
    #[comptime] tile: Tile,
) {
    let stride = comptime!(tile.stride());
    let per_row = comptime!(tile.columns_per_unit());
    let out_per_row = comptime!(tile.runs_per_unit() * tile.run());
    let strips = comptime!(tile.rows_per_unit / 2);
    let unit = UNIT_POS as usize % 32;
    // Read transposed: first and second 8 columns of the left 8 values, then of the right 8.
    let column = (from + unit % 16) * stride + unit / 16;
    #[unroll]
    for k in 0..comptime!(tile.columns / 16) {
        let mut left = Sequence::<Sequence<u32>>::new();
        #[unroll]
        for strip in 0..strips {
            // Two adjacent accumulators of 16 × 8 form a left operand of 16 × 16.
            let mut operand = Sequence::<u32>::new();
            #[unroll]
            for i in 0..4usize {
                let at = comptime!((strip * 2 + i % 2) * per_row + k * 4 + i / 2 * 2);
                let mut two = Vector::<f32, Const<2>>::empty();
                two.insert(0usize, product[at]);
                two.insert(1usize, product[comptime!(at + 1)]);
                operand.push(u32::reinterpret(Vector::<E, Const<2>>::cast_from(two)));
            }
            left.push(operand);
        }
        #[unroll]
        for pair in 0..comptime!(tile.head_dim / 16) {
            let begin = column + comptime!(k * 16 * stride + pair * 2);
            let right = load::<E, N>(columns, begin, MatrixIdent::B, true);
            #[unroll]
            for strip in 0..strips {
                let at = comptime!(strip * 2 * out_per_row + pair * 4);
                multiply(out, left.index(strip), &right, at, out_per_row, tile);
            }
        }
    }
}

/// Adds a product of 16 × 16 × 16 to the values of `sums` from `at` on, whose rows are `per_row` apart.
///
/// Uses assembly, because CubeCL's version copies registers to and from arrays and triples the code size.
#[cube]
fn multiply(
    sums: &mut Array<f32>,
    left: &Sequence<u32>,
    right: &Sequence<u32>,
    #[comptime] at: usize,
    #[comptime] per_row: usize,
    #[comptime] tile: Tile,
) {
    let operand = comptime!(tile.operand());
    #[unroll]
    for half in 0..2usize {
        let upper = comptime!(at + 2 * half);
        let lower = comptime!(upper + per_row);
        let sum: Vector<f32, Const<4>>;
        gpu_asm!(
            "mma.sync.aligned.m16n8k16.row.col.f32.{operand}.{operand}.f32 {sum}, ",
            "{{{a0}, {a1}, {a2}, {a3}}}, {{{b0}, {b1}}}, {{{c0}, {c1}, {c2}, {c3}}};",
            a0 = in(_) *left.index(0usize),
            a1 = in(_) *left.index(1usize),
            a2 = in(_) *left.index(2usize),
            a3 = in(_) *left.index(3usize),
            b0 = in(_) *right.index(comptime!(2 * half)),
            b1 = in(_) *right.index(comptime!(2 * half + 1)),
            c0 = in(_) sums[upper],
            c1 = in(_) sums[comptime!(upper + 1)],
            c2 = in(_) sums[lower],
            c3 = in(_) sums[comptime!(lower + 1)],
            sum = out(_) sum,
            options(nomem),
        );
        sums[upper] = sum.extract(0usize);
        sums[comptime!(upper + 1)] = sum.extract(1usize);
        sums[lower] = sum.extract(2usize);
        sums[comptime!(lower + 1)] = sum.extract(3usize);
    }
}

#[cube]
fn score_fma<E: Float, N: Size>(
    scores: &mut Array<f32>,
    rows: &Shared<[Vector<E, N>]>,
    columns: &Shared<[Vector<E, N>]>,
    from: usize,
    #[comptime] tile: Tile,
) {
    let stride = comptime!(tile.stride());
    let per_row = comptime!(tile.columns_per_unit());
    let vector = comptime!(tile.vector());
    for k in 0..comptime!(tile.row_vectors()) {
        let mut left = Array::<Vector<f32, N>>::new(comptime!(tile.rows_per_unit));
        #[unroll]
        for r in 0..comptime!(tile.rows_per_unit) {
            left[r] = Vector::cast_from(rows[row_of(r, tile) as usize * stride + k]);
        }
        #[unroll]
        for c in 0..per_row {
            let at = (from + column_of(c, tile) as usize) * stride + k;
            let right = Vector::<f32, N>::cast_from(columns[at]);
            #[unroll]
            for r in 0..comptime!(tile.rows_per_unit) {
                let products = left[r] * right;
                #[unroll]
                for w in 0..vector {
                    scores[comptime!(r * per_row + c)] += products.extract(w);
                }
            }
        }
    }
}

#[cube]
fn accumulate_fma<E: Float, N: Size>(
    out: &mut Array<f32>,
    published: &Shared<[f32]>,
    at: usize,
    columns: &Shared<[Vector<E, N>]>,
    from: usize,
    #[comptime] tile: Tile,
) {
    let stride = comptime!(tile.stride());
    let runs = comptime!(tile.runs_per_unit());
    let run = comptime!(tile.run());
    for k in 0..comptime!(tile.columns) {
        let mut left = Array::<f32>::new(comptime!(tile.rows_per_unit));
        #[unroll]
        for r in 0..comptime!(tile.rows_per_unit) {
            left[r] = published[at + row_of(r, tile) as usize * comptime!(tile.columns) + k];
        }
        #[unroll]
        for v in 0..runs {
            // Past the end of a row, reads the first run instead, and never writes its result.
            let index = if comptime!(tile.runs_past()) {
                let last = comptime!((tile.head_dim / run) as u32);
                select(run_of(v, tile) < last, run_of(v, tile), 0u32)
            } else {
                run_of(v, tile)
            };
            let right = Vector::<f32, N>::cast_from(columns[(from + k) * stride + index as usize]);
            #[unroll]
            for r in 0..comptime!(tile.rows_per_unit) {
                #[unroll]
                for w in 0..run {
                    out[comptime!((r * runs + v) * run + w)] += left[r] * right.extract(w);
                }
            }
        }
    }
}
