//! Sums with the residual stream, and their normalisation.

use std::time::{Duration, Instant};

use burn_backend::ops::FloatTensorOps;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::rms_norm::inverse_rms;
use super::sums::units_for;
use super::{contiguous, cubes, elem, empty, len_of, vector_size};
use crate::ops::residual::ResidualOp;
use crate::ops::rms_norm::{RmsNormKernels, width_of};
use crate::ops::shared::SharedInput;

impl ResidualOp for CubeBackend {
    fn fused_residual(x: CubeTensor, y: CubeTensor, _: SharedInput) -> CubeTensor {
        // Held, so that burn never adds in the memory of `x`. It could do so in some calls and not in others, which
        // are different kernels: a run would compile one that its warm-up had not met.
        let _held = x.clone();
        Self::float_add(x, y)
    }

    fn fused_residual_norm(
        x: CubeTensor,
        y: CubeTensor,
        weight: CubeTensor,
        eps: f64,
        [before, _]: [SharedInput; 2],
    ) -> (CubeTensor, CubeTensor) {
        if !(wait_for_sole_owner(&y) && y.is_contiguous()) {
            // Somebody looks at `y`, and it must not become the sum.
            let sum = Self::fused_residual(x, y, before);
            let normed = Self::rms_norm_forward(&sum, &weight, eps);
            return (sum, normed);
        }
        let width = width_of(&x, &weight);
        let (x, weight, sum) = (contiguous(&x), contiguous(&weight), y);
        let normed = empty(&x, x.meta.shape().clone(), x.dtype);
        let rows = len_of(&x) / width;
        let vector = vector_size(&[&x, &weight], width);
        let units = units_for(width / vector);
        // SAFETY: cubes beyond the last row do nothing, units stay within the width of a row, and `sum` has the
        // shape and the dtype of `x`.
        unsafe {
            launch! {
                residual_norm_kernel, cubes(&x.client, rows, units), [x], vector;
                x / vector, weight / vector, sum / vector, normed / vector;
                rows, eps as f32, width / vector, units, [elem(&x), elem(&weight)]
            }
        }
        (sum, normed)
    }
}

/// Whether nobody else holds the memory of `tensor`. While CubeCL's server places a new buffer, it holds one more
/// handle to it: this waits until that is over, for at most 0.1 ms, which is also what a tensor takes that really has
/// another owner.
fn wait_for_sole_owner(tensor: &CubeTensor) -> bool {
    const PATIENCE: Duration = Duration::from_micros(100);
    let begun = Instant::now();
    while !tensor.can_mut() {
        if begun.elapsed() > PATIENCE {
            return false;
        }
        std::thread::yield_now();
    }
    true
}

/// Adds `x` to each row of `sum` and normalises the row that is stored: each unit keeps the columns `unit`,
/// `unit + units`, … of it, so that nothing is read twice.
#[cube(launch_unchecked, address_type = "dynamic")]
fn residual_norm_kernel<F: Float, W: Float, N: Size>(
    x: &[Vector<F, N>],
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
            let result = Vector::<f32, N>::cast_from(sum[start + i]);
            // Rounded, as whoever reads the sum finds it.
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
