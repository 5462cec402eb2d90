//! The two products of tiles with `wgmma`, available on compute capability 9.0.
//!
//! Operands in shared memory are *descriptors* of rows in the layout of [`place_of`](super::stage::place_of).
//!
//! A product is one block of assembly, from the fence to the wait for the result, so that the compiler cannot use its
//! registers in between.
//!
//! Outputs are written before the last input is read, which CubeCL cannot declare. The compiler may give an output the
//! register of an input that is its copy. Only a sum and its own new value are copies, and may share a register.
//! Separate registers would cost 50 to 100 moves per step.

use std::fmt::Write;

use cubecl::prelude::*;

use super::tile::{ATOM_BYTES, Tile};

const PANEL_ROW_BYTES: usize = 128;
const DEPTH: usize = 16;

/// Computes [`score`](super::product::score) for columns staged from row `from` on.
#[cube]
pub(super) fn score_wgmma<E: Float, N: Size>(
    scores: &mut Array<f32>,
    rows: &Shared<[Vector<E, N>]>,
    kept: &Array<u32>,
    columns: &Shared<[Vector<E, N>]>,
    from: usize,
    #[comptime] tile: Tile,
) {
    match comptime!((tile.scores_per_unit(), tile.keeps_rows, tile.head_dim)) {
        (32, false, _) => score_staged::<E, N, Const<32>>(scores, rows, columns, from, tile),
        (64, false, _) => score_staged::<E, N, Const<64>>(scores, rows, columns, from, tile),
        (32, true, 64) => score_kept::<E, N, Const<32>, Const<16>>(scores, kept, columns, from, tile),
        (32, true, 128) => score_kept::<E, N, Const<32>, Const<32>>(scores, kept, columns, from, tile),
        other => comptime!(panic!("wgmma: {other:?} scores per unit, kept rows, width of heads")),
    }
}

/// Computes scores with rows in shared memory. A unit holds `S` scores.
#[cube]
fn score_staged<E: Float, N: Size, S: Size>(
    scores: &mut Array<f32>,
    rows: &Shared<[Vector<E, N>]>,
    columns: &Shared<[Vector<E, N>]>,
    from: usize,
    #[comptime] tile: Tile,
) {
    let text = comptime!(score_text(&tile));
    let product: Vector<f32, S>;
    gpu_asm!(
        "{text} // {product} {left} {right}",
        left = in(_) begin_of::<E, N>(rows, 0usize, tile),
        right = in(_) begin_of::<E, N>(columns, from, tile),
        product = out(_) product,
        options(readonly),
    );
    unpack(scores, product, comptime!(tile.columns_per_unit()));
}

/// Computes scores with rows in registers. A unit holds `S` scores, and `L` registers with two row values each.
#[cube]
fn score_kept<E: Float, N: Size, S: Size, L: Size>(
    scores: &mut Array<f32>,
    kept: &Array<u32>,
    columns: &Shared<[Vector<E, N>]>,
    from: usize,
    #[comptime] tile: Tile,
) {
    let mut left = Vector::<u32, L>::empty();
    #[unroll]
    for i in 0..comptime!(tile.head_dim / 4) {
        left.insert(i, kept[i]);
    }
    let text = comptime!(score_text(&tile));
    let product: Vector<f32, S>;
    gpu_asm!(
        "{text} // {product} {left} {right}",
        left = in(_) Vector::<u32, L>::cast_from(left),
        right = in(_) begin_of::<E, N>(columns, from, tile),
        product = out(_) product,
        options(readonly),
    );
    unpack(scores, product, comptime!(tile.columns_per_unit()));
}

#[cube]
fn begin_of<E: Float, N: Size>(
    rows: &Shared<[Vector<E, N>]>,
    from: usize,
    #[comptime] tile: Tile,
) -> *const Vector<E, N> {
    let at = from * comptime!(tile.stride());
    // SAFETY: `wgmma` reads rows of the tile through the pointer, and nothing else uses it.
    unsafe { rows[at..at + 1].as_ptr_unchecked() }
}

/// Computes [`accumulate`](super::product::accumulate) for columns staged from row `from` on.
#[cube]
pub(super) fn accumulate_wgmma<E: Float, N: Size>(
    out: &mut Array<f32>,
    product: &Array<f32>,
    columns: &Shared<[Vector<E, N>]>,
    from: usize,
    #[comptime] tile: Tile,
) {
    match comptime!((tile.values_per_unit(), tile.scores_per_unit())) {
        (32, 32) => accumulate_of::<E, N, Const<32>, Const<16>>(out, product, columns, from, tile),
        (32, 64) => accumulate_of::<E, N, Const<32>, Const<32>>(out, product, columns, from, tile),
        (64, 32) => accumulate_of::<E, N, Const<64>, Const<16>>(out, product, columns, from, tile),
        (64, 64) => accumulate_of::<E, N, Const<64>, Const<32>>(out, product, columns, from, tile),
        other => comptime!(panic!("wgmma: {other:?} values and scores per unit")),
    }
}

/// Adds the product to the sums. A unit holds `V` values, and `L` registers with two scores each as left operand.
#[cube]
fn accumulate_of<E: Float, N: Size, V: Size, L: Size>(
    out: &mut Array<f32>,
    product: &Array<f32>,
    columns: &Shared<[Vector<E, N>]>,
    from: usize,
    #[comptime] tile: Tile,
) {
    let per_row = comptime!(tile.columns_per_unit());
    let out_per_row = comptime!(tile.runs_per_unit() * tile.run());
    let mut left = Vector::<u32, L>::empty();
    #[unroll]
    for k in 0..comptime!(tile.columns / DEPTH) {
        // Two adjacent accumulators of 8 columns form a left operand of 16.
        #[unroll]
        for i in 0..4usize {
            let at = comptime!(i % 2 * per_row + k * 4 + i / 2 * 2);
            let mut two = Vector::<f32, Const<2>>::empty();
            two.insert(0usize, product[at]);
            two.insert(1usize, product[comptime!(at + 1)]);
            left.insert(comptime!(4 * k + i), u32::reinterpret(Vector::<E, Const<2>>::cast_from(two)));
        }
    }
    let mut sums = Vector::<f32, V>::empty();
    #[unroll]
    for r in 0..2usize {
        #[unroll]
        for c in 0..out_per_row {
            sums.insert(comptime!(register_of(r, c)), out[comptime!(r * out_per_row + c)]);
        }
    }
    let text = comptime!(accumulate_text(&tile));
    let sum: Vector<f32, V>;
    gpu_asm!(
        "{text} // {sum} {sums} {left} {right}",
        sums = in(_) Vector::<f32, V>::cast_from(sums),
        left = in(_) Vector::<u32, L>::cast_from(left),
        right = in(_) begin_of::<E, N>(columns, from, tile),
        sum = out(_) sum,
        options(readonly),
    );
    unpack(out, sum, out_per_row);
}

#[cube]
fn unpack<S: Size>(values: &mut Array<f32>, registers: Vector<f32, S>, #[comptime] per_row: usize) {
    #[unroll]
    for r in 0..2usize {
        #[unroll]
        for c in 0..per_row {
            values[comptime!(r * per_row + c)] = registers.extract(comptime!(register_of(r, c)));
        }
    }
}

/// Returns the register of value `column` of a unit's row `row`: pairs of the two rows alternate.
fn register_of(row: usize, column: usize) -> usize {
    column / 2 * 4 + row * 2 + column % 2
}

/// Formats `count` operands of assembly, numbered from `first` on, in braces.
fn operands(first: usize, count: usize) -> String {
    let names: Vec<_> = (first..first + count).map(|number| format!("%{number}")).collect();
    format!("{{{}}}", names.join(", "))
}

/// Assembly that creates descriptor `name` of the rows at the pointer in operand `pointer`, with panels `panel` bytes
/// apart.
fn descriptor(name: &str, pointer: usize, panel: usize) -> String {
    const SWIZZLE_128_BYTES: u64 = 1 << 62;
    let fields = SWIZZLE_128_BYTES | (ATOM_BYTES as u64 >> 4) << 32 | (panel as u64 >> 4) << 16;
    format!(
        ".reg .b64 {name}, next_{name};\n\
         cvta.to.shared.u64 {name}, %{pointer};\n\
         shr.u64 {name}, {name}, 4;\n\
         or.b64 {name}, {name}, {fields:#x};\n"
    )
}

/// Assembly that sums `steps` products, with the operands of step `k` from `operands_of(k)`.
fn products(tile: &Tile, columns: usize, steps: usize, operands_of: impl Fn(usize) -> [String; 2]) -> String {
    let elem = tile.operand();
    let mut text = "wgmma.fence.sync.aligned;\n".to_owned();
    for step in 0..steps {
        let [before, operands] = operands_of(step);
        let _ = writeln!(
            text,
            "{before}wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{elem}.{elem} {operands};"
        );
    }
    text + "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n"
}

/// Assembly that computes the scores. Operands: scores; rows, or a pointer to them; a pointer to the columns.
fn score_text(tile: &Tile) -> String {
    let count = tile.scores_per_unit();
    let scores = operands(0, count);
    let [row_panel, column_panel] = [tile.rows, tile.columns].map(|rows| rows * PANEL_ROW_BYTES);
    let steps_per_panel = PANEL_ROW_BYTES / (2 * DEPTH);
    let products = products(tile, tile.columns, tile.head_dim / DEPTH, |step| {
        let (panel, within) = (step / steps_per_panel, step % steps_per_panel * 2 * DEPTH);
        let [row_step, column_step] = [row_panel, column_panel].map(|bytes| (panel * bytes + within) >> 4);
        let right = format!("add.s64 next_columns, columns, {column_step};\n");
        let add = if step == 0 { "first" } else { "later" };
        if tile.keeps_rows {
            let left = operands(count + 4 * step, 4);
            [right, format!("{scores}, {left}, next_columns, {add}, 1, 1, 0")]
        } else {
            let left = format!("add.s64 next_rows, rows, {row_step};\n");
            [left + &right, format!("{scores}, next_rows, next_columns, {add}, 1, 1, 0, 0")]
        }
    });
    let (rows, pointer) = if tile.keeps_rows {
        (String::new(), count + tile.head_dim / 4)
    } else {
        (descriptor("rows", count, row_panel), count + 1)
    };
    format!(
        "{{\n{rows}{}.reg .b32 zero;\n.reg .pred first, later;\nmov.b32 zero, 0;\nsetp.ne.b32 first, zero, 0;\n\
         setp.eq.b32 later, zero, 0;\n{products}}}",
        descriptor("columns", pointer, column_panel),
    )
}

/// Assembly that computes the sums. Operands: new sums, old sums, left operand, a pointer to the columns.
fn accumulate_text(tile: &Tile) -> String {
    let (count, depth) = (tile.values_per_unit(), tile.columns / DEPTH);
    let sums = operands(0, count);
    let moves: String = (0..count).map(|i| format!("mov.f32 %{i}, %{};\n", count + i)).collect();
    let panel = tile.columns * PANEL_ROW_BYTES;
    let products = products(tile, tile.head_dim, depth, |step| {
        // The columns are the depth of this product: a step is 16 rows of 128 bytes.
        let begin = (step * DEPTH * PANEL_ROW_BYTES) >> 4;
        let left = operands(2 * count + 4 * step, 4);
        [
            format!("add.s64 next_columns, columns, {begin};\n"),
            format!("{sums}, {left}, next_columns, always, 1, 1, 1"),
        ]
    });
    format!(
        "{{\n{}.reg .b32 zero;\n.reg .pred always;\nmov.b32 zero, 0;\nsetp.eq.b32 always, zero, 0;\n{moves}{products}}}",
        descriptor("columns", 2 * count + 4 * depth, panel),
    )
}
