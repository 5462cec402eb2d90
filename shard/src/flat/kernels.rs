//! CubeCL kernels on flat buffers: casting, accumulating, sums of squares, AdamW.
//!
//! One unit handles one element. No kernel adds with atomics: the same values give the same bits.

use cubecl::prelude::*;

/// Sets elements `start..end`.
#[cube(launch_unchecked)]
pub(super) fn fill<F: Float>(to: &mut [F], start: u32, end: u32, value: f32) {
    let position = ABSOLUTE_POS + start as usize;
    if position < end as usize {
        to[position] = F::cast_from(value);
    }
}

/// Writes `from` in the type of `to`; both are as long.
#[cube(launch_unchecked)]
pub(super) fn convert<A: Float, B: Float>(from: &[A], to: &mut [B]) {
    if ABSOLUTE_POS < to.len() {
        to[ABSOLUTE_POS] = B::cast_from(from[ABSOLUTE_POS]);
    }
}

/// Adds the `len` elements of `from` to those of `to` from `start` on, or replaces these.
#[cube(launch_unchecked)]
pub(super) fn accumulate<F: Float>(
    from: &[F],
    to: &mut [f32],
    start: u32,
    len: u32,
    #[comptime] replace: bool,
) {
    if ABSOLUTE_POS < len as usize {
        let position = ABSOLUTE_POS + start as usize;
        let value = f32::cast_from(from[ABSOLUTE_POS]);
        if comptime!(replace) {
            to[position] = value;
        } else {
            to[position] += value;
        }
    }
}

/// The sum of squares of `chunk` elements of `start..end` per cube, into `sums` from `first` on.
#[cube(launch_unchecked)]
pub(super) fn squares(
    values: &[f32],
    sums: &mut [f32],
    start: u32,
    end: u32,
    first: u32,
    #[comptime] chunk: usize,
    #[comptime] units: usize,
) {
    let mut shared = Shared::<[f32]>::new_slice(units);
    let unit = UNIT_POS as usize;
    let begin = start as usize + CUBE_POS * chunk;
    let limit = select(begin + chunk < end as usize, begin + chunk, end as usize);
    let mut sum = 0.0f32;
    let mut position = begin + unit;
    while position < limit {
        let value = values[position];
        sum += value * value;
        position += units;
    }
    shared[unit] = sum;
    sync_cube();
    let mut half = comptime!(units / 2).runtime();
    while half > 0 {
        if unit < half {
            let other = shared[unit + half];
            shared[unit] += other;
        }
        sync_cube();
        half /= 2;
    }
    // Cubes behind the last chunk, which a grid of several dimensions may have, find nothing to sum.
    if unit == 0 && begin < end as usize {
        sums[first as usize + CUBE_POS] = shared[0];
    }
}

/// One AdamW step of elements `start..end`, as on the CPU.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub(super) fn adamw(
    weights: &mut [f32],
    first: &mut [f32],
    second: &mut [f32],
    gradient: &[f32],
    start: u32,
    end: u32,
    clip: f32,
    beta1: f32,
    beta2: f32,
    epsilon: f32,
    step_size: f32,
    second_root: f32,
    keep: f32,
) {
    let position = ABSOLUTE_POS + start as usize;
    if position < end as usize {
        let gradient = gradient[position] * clip;
        let m = beta1 * first[position] + (1.0f32 - beta1) * gradient;
        let v = beta2 * second[position] + (1.0f32 - beta2) * gradient * gradient;
        first[position] = m;
        second[position] = v;
        let denominator = v.sqrt() / second_root + epsilon;
        weights[position] = weights[position] * keep - step_size * (m / denominator);
    }
}
