//! Floats as defined by PTX: rounding in four directions, halves, TF32, and NaN.

use crate::program::{Kind, Mode, Round};

/// The NaN that operations on f32 return.
pub const NAN: u32 = 0x7fff_ffff;

/// Returns `value` with the canonical representation of NaN.
#[inline(always)]
pub fn canonical(value: f32) -> f32 {
    if value.is_nan() { f32::from_bits(NAN) } else { value }
}

#[inline(always)]
pub fn flushed(value: f32) -> f32 {
    if value.is_subnormal() { 0.0f32.copysign(value) } else { value }
}

/// `value + rest` as f32, where `rest` is less than half of the last place of `value`.
pub fn rounded(value: f64, rest: f64, round: Round) -> f32 {
    let near = value as f32;
    if !value.is_finite() {
        return near;
    }
    // Sign of the exact value minus the nearest.
    let off = match f64::from(near) {
        n if value > n => 1,
        n if value < n => -1,
        _ if rest > 0.0 => 1,
        _ if rest < 0.0 => -1,
        _ => 0,
    };
    let up = match round {
        Round::Nearest | Round::NearestAway => return nearest(value, rest),
        Round::Up => true,
        Round::Down => false,
        Round::Zero => value < 0.0 || (value == 0.0 && rest < 0.0),
    };
    match (up, off) {
        (true, 1) => near.next_up(),
        (false, -1) => near.next_down(),
        _ => near,
    }
}

/// Returns the nearest f32 to a `value` that may have been rounded; `rest` decides ties.
fn nearest(value: f64, rest: f64) -> f32 {
    odd(value, rest) as f32
}

/// `value + rest` with an odd last bit if inexact, so that it is not midway between two shorter floats.
fn odd(value: f64, rest: f64) -> f64 {
    if rest == 0.0 || !value.is_finite() || value.to_bits() & 1 == 1 {
        return value;
    }
    let away = (rest > 0.0) == (value > 0.0);
    f64::from_bits(if away { value.to_bits() + 1 } else { value.to_bits() - 1 })
}

/// `a + b` as f64, and the exact rounding error.
fn sum(a: f64, b: f64) -> (f64, f64) {
    let sum = a + b;
    let part = sum - a;
    (sum, (a - (sum - part)) + (b - part))
}

/// Returns the number 1 as a half.
pub fn one(kind: Kind) -> u32 {
    if kind == Kind::F16 { 0x3c00 } else { 0x3f80 }
}

/// Returns a · b + c in halves, rounded once.
pub fn half_multiply_add(a: u32, b: u32, c: u32, kind: Kind) -> u32 {
    let [a, b, c] = [a, b, c].map(|bits| f64::from(from_half(bits, kind)));
    // The product is exact.
    let (value, rest) = sum(a * b, c);
    to_half(odd(value, rest), kind)
}

/// a · b + c, rounded once.
#[inline(always)]
pub fn multiply_add(a: f32, b: f32, c: f32, round: Round) -> f32 {
    if round == Round::Nearest { a.mul_add(b, c) } else { multiply_add_directed(a, b, c, round) }
}

fn multiply_add_directed(a: f32, b: f32, c: f32, round: Round) -> f32 {
    let (product, c) = (f64::from(a) * f64::from(b), f64::from(c));
    let (sum, rest) = sum(product, c);
    if sum == 0.0 {
        // Opposite values give the zero of the rounding direction.
        let same = product == 0.0 && c == 0.0 && product.is_sign_negative() == c.is_sign_negative();
        return match (same, round) {
            (true, _) => sum as f32,
            (false, Round::Down) => -0.0,
            (false, _) => 0.0,
        };
    }
    rounded(sum, rest, round)
}

/// a + b, rounded once.
#[inline(always)]
pub fn add(a: f32, b: f32, round: Round) -> f32 {
    if round == Round::Nearest { a + b } else { multiply_add_directed(a, 1.0, b, round) }
}

/// a · b, rounded once.
#[inline(always)]
pub fn multiply(a: f32, b: f32, round: Round) -> f32 {
    // The product of two f32 is exact in f64.
    if round == Round::Nearest { a * b } else { rounded(f64::from(a) * f64::from(b), 0.0, round) }
}

/// Returns the smaller number, or the one that is not NaN.
#[inline(always)]
pub fn minimum(a: f32, b: f32) -> f32 {
    let smaller = if a < b || (a == b && a.is_sign_negative()) { a } else { b };
    canonical(if b.is_nan() { a } else { smaller })
}

/// Returns the larger number, or the one that is not NaN.
#[inline(always)]
pub fn maximum(a: f32, b: f32) -> f32 {
    let larger = if a > b || (a == b && a.is_sign_positive()) { a } else { b };
    canonical(if b.is_nan() { a } else { larger })
}

/// 2 to the power of `x`, correctly rounded to f32 except for ties within 2⁻⁵⁰.
#[inline(always)]
pub fn exp2(x: f32) -> f32 {
    // Beyond these limits, the result is 0 or infinite anyway.
    let x = f64::from(x);
    let clamped = x.clamp(-160.0, 140.0);
    let whole = clamped.round_ties_even();
    let t = (clamped - whole) * std::f64::consts::LN_2;
    // The series of e^t, for |t| up to 0.35.
    let mut sum = 1.0 / 479_001_600.0;
    let mut factorial =
        [39_916_800.0, 3_628_800.0, 362_880.0, 40_320.0, 5_040.0, 720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0];
    for n in &mut factorial {
        sum = sum * t + 1.0 / *n;
    }
    let scale = f64::from_bits(((whole as i32 as i64 + 1023) as u64) << 52);
    let result = (sum * scale) as f32;
    if x.is_nan() { f32::from_bits(NAN) } else { result }
}

/// Returns the bits of the bf16 nearest to `value`.
#[inline(always)]
pub fn to_bf16(value: f32) -> u32 {
    let bits = value.to_bits();
    let near = (bits.wrapping_add(0x7fff + (bits >> 16 & 1))) >> 16;
    if value.is_nan() { 0x7fff } else { near }
}

#[inline(always)]
pub fn from_bf16(bits: u32) -> f32 {
    f32::from_bits(bits << 16)
}

/// Returns the bits of the f16 nearest to `value`.
#[inline(always)]
pub fn to_f16(value: f32) -> u32 {
    let bits = value.to_bits();
    let sign = bits >> 16 & 0x8000;
    let magnitude = bits & 0x7fff_ffff;
    // Adding the right power of two makes the addition in f32 round at the last place of a subnormal f16.
    let small = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0x3f00_0000);
    let near = magnitude.wrapping_add(0xc800_0fff).wrapping_add(magnitude >> 13 & 1) >> 13;
    let result = if magnitude < 0x3880_0000 { small } else { near.min(0x7c00) };
    if magnitude > 0x7f80_0000 {
        0x7fff
    } else {
        sign | if magnitude >= 0x4780_0000 { 0x7c00 } else { result }
    }
}

#[inline(always)]
pub fn from_f16(bits: u32) -> f32 {
    let sign = (bits & 0x8000) << 16;
    let magnitude = bits & 0x7fff;
    // The exponents differ by 112; the product normalises subnormal values.
    let scaled = f32::from_bits(magnitude << 13) * f32::from_bits(0x7780_0000);
    let special = f32::from_bits(0x7f80_0000 | magnitude << 13);
    let value = if magnitude >= 0x7c00 { special } else { scaled };
    f32::from_bits(sign | value.to_bits())
}

#[inline(always)]
pub fn from_half(bits: u32, kind: Kind) -> f32 {
    if kind == Kind::F16 { from_f16(bits) } else { from_bf16(bits) }
}

/// Rounds to the nearest half. `value` must be unrounded: f64 has more than twice the bits of a half.
pub fn to_half(value: f64, kind: Kind) -> u32 {
    let near = value as f32;
    // Rounding twice would be wrong midway between two halves; an odd last bit keeps inexact values off the
    // middle.
    let off = value - f64::from(near);
    let odd = match near.to_bits() & 1 == 0 && off != 0.0 && near.is_finite() {
        true if (off > 0.0) == (value > 0.0) => f32::from_bits(near.to_bits() | 1),
        true if near != 0.0 => f32::from_bits((near.to_bits() - 1) | 1),
        _ => near,
    };
    if kind == Kind::F16 { to_f16(odd) } else { to_bf16(odd) }
}

/// Rounds f32 to the nearest TF32 with ten bits; ties go away from zero.
#[inline(always)]
pub fn to_tf32(value: f32) -> f32 {
    let bits = value.to_bits().wrapping_add(0x1000) & 0xffff_e000;
    if value.is_finite() { f32::from_bits(bits) } else { canonical(value) }
}

/// Applies an operation, with optional flushing of operands and result, and optional saturation.
#[inline(always)]
pub fn with_mode<const N: usize>(values: [f32; N], mode: Mode, operation: impl Fn([f32; N]) -> f32) -> f32 {
    let values = if mode.flush { values.map(flushed) } else { values };
    let mut result = operation(values);
    if mode.flush {
        result = flushed(result);
    }
    if mode.saturate { saturated(result) } else { canonical(result) }
}

/// Clamps to the range from 0 to 1; NaN becomes 0.
#[inline(always)]
pub fn saturated<T: PartialOrd + From<u8>>(value: T) -> T {
    let (zero, one) = (T::from(0), T::from(1));
    if value >= one {
        one
    } else if value > zero {
        value
    } else {
        zero
    }
}

/// Converts a number without a fraction to the nearest representable integer.
pub fn to_int(whole: f64, signed: bool, bits: u32) -> u64 {
    if signed {
        let limit = i64::MAX >> (64 - bits);
        // Rust's casts saturate to the limits of i64, and turn NaN into 0.
        (whole as i64).clamp(-limit - 1, limit) as u64
    } else {
        (whole as u64).min(u64::MAX >> (64 - bits))
    }
}

/// Converts an integer to a float: the sum of its parts, rounded once.
pub fn from_int(value: i128, round: Round) -> f32 {
    let high = value as f64;
    rounded(high, (value - high as i128) as f64, round)
}

/// Rounds to a number without a fraction.
pub fn integral(value: f64, round: Round) -> f64 {
    match round {
        Round::Nearest => value.round_ties_even(),
        Round::NearestAway => value.round(),
        Round::Zero => value.trunc(),
        Round::Down => value.floor(),
        Round::Up => value.ceil(),
    }
}
