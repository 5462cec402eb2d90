//! Root-mean-square normalisation: one cube per row in forward, one per block of rows in backward.

use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::sums::{Reduction, column_sums, cube_reduce, units_for};
use super::{contiguous, contiguous_in, cubes, elem, empty, len_of, vector_size};
use crate::ops::rms_norm::{RmsNormKernels, rows_of_block, width_of};

impl RmsNormKernels for CubeBackend {
    fn rms_norm_forward(x: &CubeTensor, weight: &CubeTensor, eps: f64) -> CubeTensor {
        let width = width_of(x, weight);
        let (x, weight) = (contiguous(x), contiguous(weight));
        let y = empty(&x, x.meta.shape().clone(), x.dtype);
        let rows = len_of(&x) / width;
        let vector = vector_size(&[&x, &weight], width);
        let units = units_for(width / vector);
        // SAFETY: cubes beyond the last row do nothing, and units stay within the width of a row.
        unsafe {
            launch! {
                forward_kernel, cubes(&x.client, rows, units), [x], vector;
                x / vector, weight / vector, y / vector;
                rows, width / vector, eps as f32, units, [elem(&x), elem(&weight)]
            }
        }
        y
    }

    fn rms_norm_backward(
        x: &CubeTensor,
        weight: &CubeTensor,
        dy: &CubeTensor,
        sum: Option<CubeTensor>,
        eps: f64,
        wanted: [bool; 2],
    ) -> [Option<CubeTensor>; 2] {
        let width = width_of(x, weight);
        let (x, weight, dy) = (contiguous(x), contiguous(weight), contiguous(dy));
        let rows = len_of(&x) / width;
        let per_block = rows_of_block(rows);
        let blocks = rows.div_ceil(per_block);
        let dx = empty(&x, x.meta.shape().clone(), x.dtype);
        let partial = empty(&x, [blocks * width], DType::F32);
        let vector = vector_size(&[&x, &weight, &dy, &partial], width);
        let units = units_for(width / vector);
        let grid = cubes(&x.client, blocks, units);
        let (eps, elems) = (eps as f32, [elem(&x), elem(&weight), elem(&dy)]);
        match sum.map(|sum| contiguous_in(&sum, x.dtype)) {
            // SAFETY: rows beyond the last are skipped, units stay within a row, and `partial` has a row per block.
            None => unsafe {
                launch! {
                    backward_kernel, grid, [x, dy], vector;
                    x / vector, weight / vector, dy / vector, dx / vector, partial / vector;
                    rows, per_block, eps, width / vector, units, elems
                }
            },
            Some(sum) => {
                assert_eq!(len_of(&sum), len_of(&x), "rms_norm: the gradient of the stream");
                // SAFETY: as above, and `sum` has the shape and the dtype of `x`.
                unsafe {
                    launch! {
                        residual_backward_kernel, grid, [x, dy], vector;
                        x / vector, weight / vector, dy / vector, sum / vector, dx / vector, partial / vector;
                        rows, per_block, eps, width / vector, units, elems
                    }
                }
            }
        }
        let dw = || column_sums(&partial, [blocks, width], weight.dtype);
        [wanted[0].then_some(dx), wanted[1].then(dw)]
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn forward_kernel<F: Float, W: Float, N: Size>(
    x: &[Vector<F, N>],
    weight: &[Vector<W, N>],
    y: &mut [Vector<F, N>],
    rows: usize,
    width: usize,
    eps: f32,
    #[comptime] units: usize,
    #[define(F, W)] _dtypes: [ElemType; 2],
) {
    let row = CUBE_POS;
    if row >= rows {
        terminate!();
    }
    let start = row * width;
    let mut squares = Vector::<f32, N>::new(0.0f32);
    let mut i = UNIT_POS as usize;
    while i < width {
        let value = Vector::<f32, N>::cast_from(x[start + i]);
        squares += value * value;
        i += units;
    }
    let r = Vector::<f32, N>::new(inverse_rms(squares.vector_sum(), width * N::value(), eps, units));
    let mut i = UNIT_POS as usize;
    while i < width {
        let value = Vector::<f32, N>::cast_from(x[start + i]);
        let w = Vector::<f32, N>::cast_from(weight[i]);
        y[start + i] = Vector::cast_from(value * r * w);
        i += units;
    }
}

/// Returns `1 / sqrt(mean(x²) + eps)` of a row of `count` values; `squares` is this unit's sum of squares.
#[cube]
pub(super) fn inverse_rms(squares: f32, count: usize, eps: f32, #[comptime] units: usize) -> f32 {
    let sum = cube_reduce(squares, Reduction::Sum, units);
    1.0f32 / (sum / f32::cast_from(count) + eps).sqrt()
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn backward_kernel<F: Float, W: Float, D: Float, N: Size>(
    x: &[Vector<F, N>],
    weight: &[Vector<W, N>],
    dy: &[Vector<D, N>],
    dx: &mut [Vector<F, N>],
    partial: &mut [Vector<f32, N>],
    rows: usize,
    per_block: usize,
    eps: f32,
    #[comptime] width: usize,
    #[comptime] units: usize,
    #[define(F, W, D)] _dtypes: [ElemType; 3],
) {
    // `x` takes the place of the sum, which is not read.
    gradients::<F, W, D, N>(x, weight, dy, x, dx, partial, rows, per_block, eps, width, units, false);
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn residual_backward_kernel<F: Float, W: Float, D: Float, N: Size>(
    x: &[Vector<F, N>],
    weight: &[Vector<W, N>],
    dy: &[Vector<D, N>],
    sum: &[Vector<F, N>],
    dx: &mut [Vector<F, N>],
    partial: &mut [Vector<f32, N>],
    rows: usize,
    per_block: usize,
    eps: f32,
    #[comptime] width: usize,
    #[comptime] units: usize,
    #[define(F, W, D)] _dtypes: [ElemType; 3],
) {
    gradients::<F, W, D, N>(x, weight, dy, sum, dx, partial, rows, per_block, eps, width, units, true);
}

/// Computes the gradients of a block of rows, reading each row once; dW stays in registers. If `adds`, `sum` is added
/// to dx before rounding.
#[cube]
fn gradients<F: Float, W: Float, D: Float, N: Size>(
    x: &[Vector<F, N>],
    weight: &[Vector<W, N>],
    dy: &[Vector<D, N>],
    sum: &[Vector<F, N>],
    dx: &mut [Vector<F, N>],
    partial: &mut [Vector<f32, N>],
    rows: usize,
    per_block: usize,
    eps: f32,
    #[comptime] width: usize,
    #[comptime] units: usize,
    #[comptime] adds: bool,
) {
    let per_unit = comptime!(width.div_ceil(units));
    let block = CUBE_POS;
    let mut last = (block + 1) * per_block;
    if last > rows {
        last = rows;
    }
    let unit = UNIT_POS as usize;
    let zero = Vector::<f32, N>::new(0.0f32);
    let mut dw = Array::<Vector<f32, N>>::new(per_unit);
    let mut values = Array::<Vector<f32, N>>::new(per_unit);
    let mut products = Array::<Vector<f32, N>>::new(per_unit);
    let count = f32::cast_from(comptime!(width) * N::value());
    #[unroll]
    for k in 0..per_unit {
        dw[k] = zero;
    }
    for row in block * per_block..last {
        let start = row * width;
        let mut squares = zero;
        let mut shifts = zero;
        #[unroll]
        for k in 0..per_unit {
            let i = unit + k * units;
            let mut value = zero;
            let mut product = zero;
            if i < width {
                value = Vector::cast_from(x[start + i]);
                product = Vector::cast_from(dy[start + i]);
            }
            values[k] = value;
            products[k] = product;
            squares += value * value;
            if i < width {
                shifts += product * Vector::cast_from(weight[i]) * value;
            }
        }
        let r = inverse_rms(squares.vector_sum(), comptime!(width) * N::value(), eps, units);
        let shift = cube_reduce(shifts.vector_sum(), Reduction::Sum, units);
        let shift = Vector::<f32, N>::new(shift * r / count);
        let r = Vector::<f32, N>::new(r);
        #[unroll]
        for k in 0..per_unit {
            let i = unit + k * units;
            let normal = values[k] * r;
            dw[k] += products[k] * normal;
            if i < width {
                let w = Vector::<f32, N>::cast_from(weight[i]);
                let mut gradient = r * (products[k] * w - normal * shift);
                if comptime!(adds) {
                    gradient += Vector::<f32, N>::cast_from(sum[start + i]);
                }
                dx[start + i] = Vector::cast_from(gradient);
            }
        }
    }
    if block * per_block < rows {
        #[unroll]
        for k in 0..per_unit {
            let i = unit + k * units;
            if i < width {
                partial[block * width + i] = dw[k];
            }
        }
    }
}
