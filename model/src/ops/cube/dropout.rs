//! Counter-based dropout with the same mask as the CPU kernel, bit for bit.

use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::{contiguous, cubes_for, elem, empty, len_of};
use crate::ops::dropout::{DropoutMask, DropoutOp};
use crate::random::{FACTORS, GOLDEN};

impl DropoutOp for CubeBackend {
    fn fused_dropout(x: &CubeTensor, mask: DropoutMask) -> CubeTensor {
        let x = contiguous(x);
        // A threshold of 0 drops nothing, and the factor is 1 in `f32`.
        let Some(last_dropped) = mask.threshold.checked_sub(1) else { return x };
        let y = empty(&x, x.meta.shape().clone(), x.dtype);
        let (last_dropped, scale) = (last_dropped as u32, mask.scale as f32);
        // SAFETY: both have the same length, and no unit goes beyond it.
        unsafe {
            launch! {
                apply_kernel, cubes_for(&x.client, len_of(&x)), [x];
                x / 1, y / 1;
                mask.first as u32, (mask.first >> 32) as u32, last_dropped, scale, elem(&x)
            }
        }
        y
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn apply_kernel<F: Float>(
    x: &[F],
    y: &mut [F],
    first_low: u32,
    first_high: u32,
    last_dropped: u32,
    scale: f32,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS >= y.len() {
        terminate!();
    }
    let kept = upper_hash(ABSOLUTE_POS, first_low, first_high) > last_dropped;
    let value = f32::cast_from(x[ABSOLUTE_POS]) * scale;
    y[ABSOLUTE_POS] = F::cast_from(select(kept, value, 0.0f32));
}

/// Returns the upper half of `mix(first + index · GOLDEN)`, in halves of 32 bits: WGSL has no wider integers.
#[cube]
fn upper_hash(index: usize, first_low: u32, first_high: u32) -> u32 {
    let mut low = u32::cast_from(index);
    let mut high = upper_half(index);
    high = times_high(low, high, comptime!(GOLDEN as u32), comptime!((GOLDEN >> 32) as u32));
    low *= comptime!(GOLDEN as u32);
    let sum = low + first_low;
    high += first_high + select(sum < low, 1u32, 0u32);
    low = sum;

    // z ^ (z >> 30), times the first factor.
    low ^= (low >> 30u32) | (high << 2u32);
    high ^= high >> 30u32;
    high = times_high(low, high, comptime!(FACTORS[0] as u32), comptime!((FACTORS[0] >> 32) as u32));
    low *= comptime!(FACTORS[0] as u32);

    // z ^ (z >> 27), times the second.
    low ^= (low >> 27u32) | (high << 5u32);
    high ^= high >> 27u32;
    high = times_high(low, high, comptime!(FACTORS[1] as u32), comptime!((FACTORS[1] >> 32) as u32));

    // The upper half of z ^ (z >> 31).
    high ^ (high >> 31u32)
}

/// Returns the upper 32 bits of a product of two 64-bit numbers, modulo 2^64.
#[cube]
fn times_high(low: u32, high: u32, #[comptime] by_low: u32, #[comptime] by_high: u32) -> u32 {
    low.mul_hi(by_low.runtime()) + low * by_high + high * by_low
}

#[cube]
fn upper_half(index: usize) -> u32 {
    // Two shifts, because a shift by all bits of a type is undefined.
    u32::cast_from((index >> 16usize) >> 16usize)
}
