//! CubeCL kernels of an optimizer step: sums of squares, the decision, AdamW, Muon, the sign of the gradient.
//!
//! No kernel adds with atomics, so the same values give the same bits.

use cubecl::prelude::*;

/// Number of steps without an overflow after which the scale of the loss is doubled.
const GROWTH_STEPS: f32 = 2000.0;

/// The largest scale of the loss.
const LARGEST_SCALE: f32 = 16_777_216.0;

/// Sums `value` over the `units` units of a cube, a power of two; only the first unit gets the result.
#[cube]
fn cube_sum(value: f32, #[comptime] units: usize) -> f32 {
    let mut shared = Shared::<[f32]>::new_slice(units);
    let unit = UNIT_POS as usize;
    shared[unit] = value;
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
    shared[0]
}

/// Computes the sum of squares of each segment. `table` has three values per segment: start, end, and a third that
/// this kernel does not read.
#[cube(launch_unchecked)]
pub(super) fn squares<N: Size>(
    values: &[Vector<f32, N>],
    table: &[u32],
    sums: &mut [f32],
    #[comptime] units: usize,
) {
    let segment = CUBE_POS;
    // The grid may have cubes beyond the last segment.
    if segment >= sums.len() {
        terminate!();
    }
    let mut position = table[segment * 3] as usize + UNIT_POS as usize;
    let end = table[segment * 3 + 1] as usize;
    let mut sum = Vector::<f32, N>::new(0.0f32);
    while position < end {
        let value = values[position];
        sum += value * value;
        position += units;
    }
    let sum = cube_sum(sum.vector_sum(), units);
    if UNIT_POS == 0 {
        sums[segment] = sum;
    }
}

/// Sums the segments of each chunk and adds the result to `chunks`, from index `first` on. Chunk `i` has segments
/// `bounds[i]..bounds[i + 1]`.
#[cube(launch_unchecked)]
pub(super) fn chunks(sums: &[f32], bounds: &[u32], chunks: &mut [f32], first: u32, #[comptime] units: usize) {
    let chunk = CUBE_POS;
    if chunk + 1 >= bounds.len() {
        terminate!();
    }
    let mut segment = bounds[chunk] as usize + UNIT_POS as usize;
    let end = bounds[chunk + 1] as usize;
    let mut sum = 0.0f32;
    while segment < end {
        sum += sums[segment];
        segment += units;
    }
    let sum = cube_sum(sum, units);
    if UNIT_POS == 0 {
        chunks[first as usize + chunk] += sum;
    }
}

/// Returns whether a value is finite. Checks its bits, because compilers may assume that all values are finite.
#[cube]
fn is_finite(value: f32) -> bool {
    u32::reinterpret(value) & 0x7f80_0000 != 0x7f80_0000
}

/// Decides whether to update. `scaling` is the loss scale and the number of updates since it was changed. `decision`
/// becomes the loss, the norm, whether to update (1, else 0, or -1 if the loss scale was too large), the factor for
/// the gradients, the loss scale, and the number of updates since it was changed.
#[cube(launch_unchecked)]
#[allow(clippy::needless_range_loop)]
pub(super) fn decide(
    chunks: &[f32],
    loss: &[f32],
    scaling: &mut [f32],
    decision: &mut [f32],
    max_norm: f32,
    #[comptime] scaled: bool,
) {
    if ABSOLUTE_POS == 0 {
        let mut sum = 0.0f32;
        for chunk in 0..chunks.len() {
            sum += chunks[chunk];
        }
        let loss = loss[0];
        let scale = scaling[0];
        let norm = sum.sqrt() / scale;
        let mut clip = 1.0f32 / scale;
        if max_norm > 0.0f32 {
            let factor = max_norm / (norm + 1e-6f32);
            if factor < 1.0f32 {
                clip *= factor;
            }
        }
        decision[0] = loss;
        decision[1] = norm;
        decision[3] = clip;
        if is_finite(norm) && is_finite(loss) {
            decision[2] = 1.0f32;
            if comptime!(scaled) {
                scaling[1] += 1.0f32;
                if scaling[1] >= comptime!(GROWTH_STEPS).runtime() {
                    scaling[1] = 0.0f32;
                    if scale < comptime!(LARGEST_SCALE).runtime() {
                        scaling[0] = scale * 2.0f32;
                    }
                }
            }
        } else {
            decision[2] = 0.0f32;
            if comptime!(scaled) {
                scaling[1] = 0.0f32;
                if is_finite(loss) && scale > 1.0f32 {
                    decision[2] = -1.0f32;
                    scaling[0] = scale * 0.5f32;
                }
            }
        }
        decision[4] = scaling[0];
        decision[5] = scaling[1];
    }
}

/// Computes the factors of one AdamW step, if `decision` allows the update. `state` is both betas to the power of the
/// number of updates, the learning rate divided by the first bias correction, and the square root of the second.
#[cube(launch_unchecked)]
pub(super) fn adamw_factors(state: &mut [f32], decision: &[f32], beta1: f32, beta2: f32, learning_rate: f32) {
    if ABSOLUTE_POS == 0 && decision[2] > 0.0f32 {
        let first = state[0] * beta1;
        let second = state[1] * beta2;
        state[0] = first;
        state[1] = second;
        state[2] = learning_rate / (1.0f32 - first);
        state[3] = (1.0f32 - second).sqrt();
    }
}

/// Performs one AdamW step on each segment, as on the CPU, if `decision` allows the update. `table` is as in
/// [`squares`]; its third value is whether the segment decays. `state` is as in [`adamw_factors`]; `keep` is the
/// factor of a decaying weight; the learning rate is multiplied by `rate`. If `compute` is given, the weights are
/// also written to it, in its dtype.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub(super) fn adamw<C: Float, N: Size>(
    weights: &mut [Vector<f32, N>],
    first: &mut [Vector<f32, N>],
    second: &mut [Vector<f32, N>],
    gradient: &[Vector<f32, N>],
    table: &[u32],
    decision: &[f32],
    state: &[f32],
    beta1: f32,
    beta2: f32,
    epsilon: f32,
    keep: f32,
    rate: f32,
    compute: &mut ComptimeOption<&mut [Vector<C, N>]>,
    #[comptime] units: usize,
) {
    let segment = CUBE_POS;
    if segment * 3 + 2 >= table.len() || decision[2] <= 0.0f32 {
        terminate!();
    }
    let mut position = table[segment * 3] as usize + UNIT_POS as usize;
    let end = table[segment * 3 + 1] as usize;
    let clip = Vector::<f32, N>::new(decision[3]);
    let step_size = Vector::<f32, N>::new(state[2] * rate);
    let second_root = Vector::<f32, N>::new(state[3]);
    let (old1, old2) = (Vector::<f32, N>::new(beta1), Vector::<f32, N>::new(beta2));
    let new1 = Vector::<f32, N>::new(1.0f32 - beta1);
    let new2 = Vector::<f32, N>::new(1.0f32 - beta2);
    let epsilon = Vector::<f32, N>::new(epsilon);
    let kept = Vector::<f32, N>::new(select(table[segment * 3 + 2] != 0, keep, 1.0f32));
    while position < end {
        let gradient = gradient[position] * clip;
        let m = old1 * first[position] + new1 * gradient;
        let v = old2 * second[position] + new2 * gradient * gradient;
        first[position] = m;
        second[position] = v;
        let denominator = v.sqrt() / second_root + epsilon;
        let weight = weights[position] * kept - step_size * (m / denominator);
        weights[position] = weight;
        #[comptime]
        match compute {
            ComptimeOption::Some(compute) => compute[position] = Vector::cast_from(weight),
            ComptimeOption::None => {}
        }
        position += units;
    }
}

/// Updates the momentum of each segment from its gradient, and replaces the gradient by Muon's direction, as on the
/// CPU, if `decision` allows the update. `table` is as in [`squares`].
#[cube(launch_unchecked)]
pub(super) fn muon_direction<N: Size>(
    gradient: &mut [Vector<f32, N>],
    momentum: &mut [Vector<f32, N>],
    table: &[u32],
    decision: &[f32],
    kept: f32,
    #[comptime] nesterov: bool,
    #[comptime] units: usize,
) {
    let segment = CUBE_POS;
    if segment * 3 + 2 >= table.len() || decision[2] <= 0.0f32 {
        terminate!();
    }
    let mut position = table[segment * 3] as usize + UNIT_POS as usize;
    let end = table[segment * 3 + 1] as usize;
    let clip = Vector::<f32, N>::new(decision[3]);
    let new = Vector::<f32, N>::new(1.0f32 - kept);
    while position < end {
        let clipped = gradient[position] * clip;
        let moved = momentum[position] + new * (clipped - momentum[position]);
        momentum[position] = moved;
        if comptime!(nesterov) {
            gradient[position] = moved - new * (moved - clipped);
        } else {
            gradient[position] = moved;
        }
        position += units;
    }
}

/// Moves the weights of each segment by an update times `rate`, if `decision` allows the update. `table` is as in
/// [`squares`]; its third value is whether the segment decays; `keep` is the factor of a decaying weight.
#[cube(launch_unchecked)]
pub(super) fn muon<N: Size>(
    weights: &mut [Vector<f32, N>],
    update: &[Vector<f32, N>],
    table: &[u32],
    decision: &[f32],
    keep: f32,
    rate: f32,
    #[comptime] units: usize,
) {
    let segment = CUBE_POS;
    if segment * 3 + 2 >= table.len() || decision[2] <= 0.0f32 {
        terminate!();
    }
    let mut position = table[segment * 3] as usize + UNIT_POS as usize;
    let end = table[segment * 3 + 1] as usize;
    let mut kept = 1.0f32;
    if table[segment * 3 + 2] != 0 {
        kept = keep;
    }
    let kept = Vector::<f32, N>::new(kept);
    let rate = Vector::<f32, N>::new(rate);
    while position < end {
        weights[position] = weights[position] * kept - rate * update[position];
        position += units;
    }
}

/// Moves the weights of each segment by `rate` against the sign of their gradient, if `decision` allows the update.
/// `table` is as in [`squares`], in vectors of `vector` elements.
#[cube(launch_unchecked)]
pub(super) fn sign(
    weights: &mut [f32],
    gradient: &[f32],
    table: &[u32],
    decision: &[f32],
    rate: f32,
    #[comptime] vector: usize,
    #[comptime] units: usize,
) {
    let segment = CUBE_POS;
    if segment * 3 + 2 >= table.len() || decision[2] <= 0.0f32 {
        terminate!();
    }
    let mut position = table[segment * 3] as usize * vector + UNIT_POS as usize;
    let end = table[segment * 3 + 1] as usize * vector;
    while position < end {
        let slope = gradient[position];
        if slope > 0.0f32 {
            weights[position] -= rate;
        } else if slope < 0.0f32 {
            weights[position] += rate;
        }
        position += units;
    }
}
