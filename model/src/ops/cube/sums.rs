//! Sums in a fixed order: within a cube, over the rows of a matrix, and small passes over a buffer.

use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::{cubes_for, elem, empty, len_of, vector_size};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reduction {
    Max,
    Sum,
}

/// Reduces `value` over the `units` units of a cube, for each of them. `units` must be a power of two.
#[cube]
pub fn cube_reduce(value: f32, #[comptime] reduction: Reduction, #[comptime] units: usize) -> f32 {
    let mut shared = Shared::<[f32]>::new_slice(units);
    let unit = UNIT_POS as usize;
    shared[unit] = value;
    sync_cube();
    let mut half = CUBE_DIM as usize / 2;
    while half > 0 {
        if unit < half {
            let other = shared[unit + half];
            match comptime!(reduction) {
                Reduction::Sum => {
                    shared[unit] += other;
                }
                Reduction::Max => {
                    if other > shared[unit] {
                        shared[unit] = other;
                    }
                }
            }
        }
        sync_cube();
        half /= 2;
    }
    let result = shared[0];
    // The next reduction reuses the shared memory.
    sync_cube();
    result
}

/// Returns the number of units for a row of `vectors` vectors, a power of two.
pub fn units_for(vectors: usize) -> usize {
    vectors.next_power_of_two().clamp(32, super::UNITS)
}

/// Columns and rows that one cube of [`column_sums`] processes at a time.
const COLUMNS: usize = 32;
const GROUPS: usize = 8;

const BLOCKS: usize = 128;

/// Sums the rows of a contiguous `[rows, width]` tensor into `[width]`: first within blocks, then over the blocks.
pub fn column_sums(x: &CubeTensor, [rows, width]: [usize; 2], dtype: DType) -> CubeTensor {
    if rows <= 2 * BLOCKS {
        return block_sums(x, [rows, width], rows.max(1), dtype);
    }
    let per_block = rows.div_ceil(BLOCKS);
    let partial = block_sums(x, [rows, width], per_block, DType::F32);
    let blocks = rows.div_ceil(per_block);
    block_sums(&partial, [blocks, width], blocks, dtype)
}

fn block_sums(x: &CubeTensor, [rows, width]: [usize; 2], per_block: usize, dtype: DType) -> CubeTensor {
    let blocks = rows.div_ceil(per_block).max(1);
    let sums = empty(x, [blocks * width], dtype);
    let count = CubeCount::Static(width.div_ceil(COLUMNS) as u32, blocks as u32, 1);
    // SAFETY: columns and rows are checked against the sizes of `x`, and `sums` has a row per block.
    unsafe {
        launch! {
            block_sums_kernel, (count, CubeDim::new_2d(COLUMNS as u32, GROUPS as u32)), [x, sums];
            x / 1, sums / 1; rows, width, per_block, [elem(x), elem(&sums)]
        }
    }
    sums
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn block_sums_kernel<F: Float, O: Float>(
    x: &[F],
    sums: &mut [O],
    rows: usize,
    width: usize,
    per_block: usize,
    #[define(F, O)] _dtypes: [ElemType; 2],
) {
    let mut shared = Shared::<[f32]>::new_slice(comptime!(COLUMNS * GROUPS));
    let block = CUBE_POS_Y as usize;
    let column = CUBE_POS_X as usize * COLUMNS + UNIT_POS_X as usize;
    let mut last = (block + 1) * per_block;
    if last > rows {
        last = rows;
    }
    let mut sum = 0.0f32;
    if column < width {
        let mut row = block * per_block + UNIT_POS_Y as usize;
        while row < last {
            sum += f32::cast_from(x[row * width + column]);
            row += GROUPS;
        }
    }
    shared[UNIT_POS as usize] = sum;
    sync_cube();
    if UNIT_POS_Y == 0 && column < width {
        let mut total = 0.0f32;
        for group in 0..GROUPS {
            total += shared[group * COLUMNS + UNIT_POS_X as usize];
        }
        sums[block * width + column] = O::cast_from(total);
    }
}

/// Allocates a contiguous tensor of zeros on the device of `like`.
pub fn zeros(like: &CubeTensor, shape: impl Into<burn::tensor::Shape>, dtype: DType) -> CubeTensor {
    let tensor = empty(like, shape, dtype);
    clear(&tensor);
    tensor
}

pub fn clear(tensor: &CubeTensor) {
    let vector = vector_size(&[tensor], len_of(tensor));
    let grid = cubes_for(&tensor.client, len_of(tensor) / vector);
    // SAFETY: no unit writes beyond the end of the tensor.
    unsafe {
        launch! { zeros_kernel, grid, [tensor], vector; tensor / vector; elem(tensor) }
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn zeros_kernel<F: Float, N: Size>(tensor: &mut [Vector<F, N>], #[define(F)] _dtype: ElemType) {
    if ABSOLUTE_POS < tensor.len() {
        tensor[ABSOLUTE_POS] = Vector::new(F::new(0.0f32));
    }
}

/// Computes `sum += factor · x` for contiguous tensors of the same length.
pub fn add_scaled(sum: &CubeTensor, x: &CubeTensor, factor: f32) {
    debug_assert_eq!(len_of(sum), len_of(x));
    let vector = vector_size(&[sum, x], len_of(sum));
    let grid = cubes_for(&sum.client, len_of(sum) / vector);
    // SAFETY: both have the same length, and no unit goes beyond it.
    unsafe {
        launch! {
            add_scaled_kernel, grid, [sum, x], vector;
            sum / vector, x / vector; factor, [elem(sum), elem(x)]
        }
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn add_scaled_kernel<S: Float, F: Float, N: Size>(
    sum: &mut [Vector<S, N>],
    x: &[Vector<F, N>],
    factor: f32,
    #[define(S, F)] _dtypes: [ElemType; 2],
) {
    if ABSOLUTE_POS < sum.len() {
        let old = Vector::<f32, N>::cast_from(sum[ABSOLUTE_POS]);
        let x = Vector::<f32, N>::cast_from(x[ABSOLUTE_POS]);
        sum[ABSOLUTE_POS] = Vector::cast_from(old + x * Vector::new(factor));
    }
}

/// Multiplies a contiguous `x` by `factor` in place.
pub fn scale(x: &CubeTensor, factor: f32) {
    let vector = vector_size(&[x], len_of(x));
    let grid = cubes_for(&x.client, len_of(x) / vector);
    // SAFETY: no unit goes beyond the end of the tensor.
    unsafe {
        launch! { scale_kernel, grid, [x], vector; x / vector; factor, elem(x) }
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn scale_kernel<F: Float, N: Size>(x: &mut [Vector<F, N>], factor: f32, #[define(F)] _dtype: ElemType) {
    if ABSOLUTE_POS < x.len() {
        let value = Vector::<f32, N>::cast_from(x[ABSOLUTE_POS]);
        x[ABSOLUTE_POS] = Vector::cast_from(value * Vector::new(factor));
    }
}

/// Adds a contiguous `row` to each row of a contiguous `x`.
pub fn add_row(x: &CubeTensor, row: &CubeTensor) {
    let vector = vector_size(&[x, row], len_of(row));
    let grid = cubes_for(&x.client, len_of(x) / vector);
    // SAFETY: no unit goes beyond the end of `x`, whose rows are as long as `row`.
    unsafe {
        launch! { add_row_kernel, grid, [x], vector; x / vector, row / vector; [elem(x), elem(row)] }
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn add_row_kernel<F: Float, W: Float, N: Size>(
    x: &mut [Vector<F, N>],
    row: &[Vector<W, N>],
    #[define(F, W)] _dtypes: [ElemType; 2],
) {
    if ABSOLUTE_POS < x.len() {
        let value = Vector::<f32, N>::cast_from(x[ABSOLUTE_POS]);
        let added = Vector::<f32, N>::cast_from(row[ABSOLUTE_POS % row.len()]);
        x[ABSOLUTE_POS] = Vector::cast_from(value + added);
    }
}
