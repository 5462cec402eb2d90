//! CubeCL kernels on flat buffers: filling, casting, accumulating.
//!
//! One unit processes one element, or one vector of elements. No kernel adds with atomics, so the same values
//! give the same bits.

use cubecl::prelude::*;

/// Sets elements `start..end` to `value`.
#[cube(launch_unchecked)]
pub(super) fn fill<F: Float>(to: &mut [F], start: u32, end: u32, value: f32) {
    let position = ABSOLUTE_POS + start as usize;
    if position < end as usize {
        to[position] = F::cast_from(value);
    }
}

/// Converts `from` to the type of `to`, which has the same length.
#[cube(launch_unchecked)]
pub(super) fn convert<A: Float, B: Float, N: Size>(from: &[Vector<A, N>], to: &mut [Vector<B, N>]) {
    if ABSOLUTE_POS < to.len() {
        to[ABSOLUTE_POS] = Vector::cast_from(from[ABSOLUTE_POS]);
    }
}

/// Adds the `len` vectors of `from` to the vectors of `to` from `start` on, or overwrites those vectors.
#[cube(launch_unchecked)]
pub(super) fn accumulate<F: Float, N: Size>(
    from: &[Vector<F, N>],
    to: &mut [Vector<f32, N>],
    start: u32,
    len: u32,
    #[comptime] replace: bool,
) {
    if ABSOLUTE_POS < len as usize {
        let position = ABSOLUTE_POS + start as usize;
        let value = Vector::<f32, N>::cast_from(from[ABSOLUTE_POS]);
        if comptime!(replace) {
            to[position] = value;
        } else {
            to[position] += value;
        }
    }
}
