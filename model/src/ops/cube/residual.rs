//! Sums with the residual stream, and their normalisation.

use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::rms_norm::inverse_rms;
use super::sums::units_for;
use super::{contiguous, cubes, cubes_for, elem, empty, len_of, vector_size};
use crate::ops::residual::ResidualOp;
use crate::ops::rms_norm::width_of;
use crate::ops::shared::SharedInput;

/// Sums are written to new memory, never over `y`: whether `y` can be overwritten depends on timing in CubeCL, and a
/// run might then need a kernel that its warm-up has not compiled.
impl ResidualOp for CubeBackend {
    fn fused_residual(x: CubeTensor, y: CubeTensor, _: SharedInput) -> CubeTensor {
        let (x, y) = (contiguous(&x), contiguous(&y));
        assert_eq!((x.meta.shape(), x.dtype), (y.meta.shape(), y.dtype), "a sum of tensors that differ");
        let sum = empty(&x, x.meta.shape().clone(), x.dtype);
        let vector = vector_size(&[&x, &y], len_of(&x));
        // SAFETY: the three have the same length and dtype, and no unit goes beyond that of `sum`.
        unsafe {
            launch! {
                residual_kernel, cubes_for(&x.client, len_of(&x) / vector), [x, y], vector;
                x / vector, y / vector, sum / vector; elem(&x)
            }
        }
        sum
    }

    fn fused_residual_norm(
        x: CubeTensor,
        y: CubeTensor,
        weight: CubeTensor,
        eps: f64,
        _: [SharedInput; 2],
    ) -> (CubeTensor, CubeTensor) {
        let width = width_of(&x, &weight);
        let (x, y, weight) = (contiguous(&x), contiguous(&y), contiguous(&weight));
        let sum = empty(&x, x.meta.shape().clone(), x.dtype);
        let normed = empty(&x, x.meta.shape().clone(), x.dtype);
        let rows = len_of(&x) / width;
        let vector = vector_size(&[&x, &y, &weight], width);
        let units = units_for(width / vector);
        // SAFETY: cubes beyond the last row do nothing, units stay within the width of a row, and `y`
        // (checked by `Residual`), `sum` and `normed` have the shape and the dtype of `x`.
        unsafe {
            launch! {
                residual_norm_kernel, cubes(&x.client, rows, units), [x, y], vector;
                x / vector, y / vector, weight / vector, sum / vector, normed / vector;
                rows, eps as f32, width / vector, units, [elem(&x), elem(&weight)]
            }
        }
        (sum, normed)
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn residual_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    y: &[Vector<F, N>],
    sum: &mut [Vector<F, N>],
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS >= sum.len() {
        terminate!();
    }
    let stream = Vector::<f32, N>::cast_from(x[ABSOLUTE_POS]);
    let result = Vector::<f32, N>::cast_from(y[ABSOLUTE_POS]);
    sum[ABSOLUTE_POS] = Vector::cast_from(stream + result);
}

/// Adds and normalises one row. Units keep their columns in registers, so each row is read once.
#[cube(launch_unchecked, address_type = "dynamic")]
fn residual_norm_kernel<F: Float, W: Float, N: Size>(
    x: &[Vector<F, N>],
    y: &[Vector<F, N>],
    weight: &[Vector<W, N>],
    sum: &mut [Vector<F, N>],
    normed: &mut [Vector<F, N>],
    rows: usize,
    eps: f32,
    #[comptime] width: usize,
    #[comptime] units: usize,
    #[define(F, W)] _dtypes: [ElemType; 2],
) {
    let row = CUBE_POS;
    if row >= rows {
        terminate!();
    }
    let per_unit = comptime!(width.div_ceil(units));
    let unit = UNIT_POS as usize;
    let start = row * width;
    let mut values = Array::<Vector<f32, N>>::new(per_unit);
    let mut squares = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for k in 0..per_unit {
        let i = unit + k * units;
        if i < width {
            let stream = Vector::<f32, N>::cast_from(x[start + i]);
            let result = Vector::<f32, N>::cast_from(y[start + i]);
            // Readers of the sum get the rounded value.
            let stored = Vector::<F, N>::cast_from(stream + result);
            sum[start + i] = stored;
            let value = Vector::<f32, N>::cast_from(stored);
            values[k] = value;
            squares += value * value;
        }
    }
    let r =
        Vector::<f32, N>::new(inverse_rms(squares.vector_sum(), comptime!(width) * N::value(), eps, units));
    #[unroll]
    for k in 0..per_unit {
        let i = unit + k * units;
        if i < width {
            let w = Vector::<f32, N>::cast_from(weight[i]);
            normed[start + i] = Vector::cast_from(values[k] * r * w);
        }
    }
}
