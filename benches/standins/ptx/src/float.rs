//! Floats as PTX has them: rounding in four directions, halves, TF32, and what is no number.

use crate::program::{Kind, Mode, Round};

/// What operations on f32 give where the result is no number.
pub const NAN: u32 = 0x7fff_ffff;

/// `value` with the one representation of what is no number.
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
    // Sign of what is exact minus what is near.
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

/// To the nearest f32, where `value` itself may have been rounded: what was left decides between two.
fn nearest(value: f64, rest: f64) -> f32 {
    odd(value, rest) as f32
}

/// `value + rest` with an odd last bit where it is not exact, so that it lies on no middle of two shorter floats.
fn odd(value: f64, rest: f64) -> f64 {
    if rest == 0.0 || !value.is_finite() || value.to_bits() & 1 == 1 {
        return value;
    }
    let away = (rest > 0.0) == (value > 0.0);
    f64::from_bits(if away { value.to_bits() + 1 } else { value.to_bits() - 1 })
}

/// `a + b` as f64, and what that leaves out, exactly.
fn sum(a: f64, b: f64) -> (f64, f64) {
    let sum = a + b;
    let part = sum - a;
    (sum, (a - (sum - part)) + (b - part))
}

/// The half that is one.
pub fn one(kind: Kind) -> u32 {
    if kind == Kind::F16 { 0x3c00 } else { 0x3f80 }
}

/// a · b + c in halves, rounded once.
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
        // Opposite values leave the zero of the direction.
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

/// The smaller, or the one that is a number.
#[inline(always)]
pub fn minimum(a: f32, b: f32) -> f32 {
    let smaller = if a < b || (a == b && a.is_sign_negative()) { a } else { b };
    canonical(if b.is_nan() { a } else { smaller })
}

/// The larger, or the one that is a number.
#[inline(always)]
pub fn maximum(a: f32, b: f32) -> f32 {
    let larger = if a > b || (a == b && a.is_sign_positive()) { a } else { b };
    canonical(if b.is_nan() { a } else { larger })
}

/// 2 to the power of `x`, to the last place of f32 but for ties within 2⁻⁵⁰.
#[inline(always)]
pub fn exp2(x: f32) -> f32 {
    // What is further out is 0 or infinite all the same.
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

/// The bits of bf16, from the nearest.
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

/// The bits of f16, from the nearest.
#[inline(always)]
pub fn to_f16(value: f32) -> u32 {
    let bits = value.to_bits();
    let sign = bits >> 16 & 0x8000;
    let magnitude = bits & 0x7fff_ffff;
    // Adding the right power of two lets the addition of f32 round at the last place of a subnormal f16.
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
    // The exponents differ by 112; a product normalises what is subnormal.
    let scaled = f32::from_bits(magnitude << 13) * f32::from_bits(0x7780_0000);
    let special = f32::from_bits(0x7f80_0000 | magnitude << 13);
    let value = if magnitude >= 0x7c00 { special } else { scaled };
    f32::from_bits(sign | value.to_bits())
}

#[inline(always)]
pub fn from_half(bits: u32, kind: Kind) -> f32 {
    if kind == Kind::F16 { from_f16(bits) } else { from_bf16(bits) }
}

/// To the nearest half, from a value that has not been rounded: f64 has more than twice its bits.
pub fn to_half(value: f64, kind: Kind) -> u32 {
    let near = value as f32;
    // Rounding twice would go wrong in the middle of two halves; an odd last bit keeps what is not exact off it.
    let off = value - f64::from(near);
    let odd = match near.to_bits() & 1 == 0 && off != 0.0 && near.is_finite() {
        true if (off > 0.0) == (value > 0.0) => f32::from_bits(near.to_bits() | 1),
        true if near != 0.0 => f32::from_bits((near.to_bits() - 1) | 1),
        _ => near,
    };
    if kind == Kind::F16 { to_f16(odd) } else { to_bf16(odd) }
}

/// f32 with the ten bits of TF32, from the nearest; of two, the one further from zero.
#[inline(always)]
pub fn to_tf32(value: f32) -> f32 {
    let bits = value.to_bits().wrapping_add(0x1000) & 0xffff_e000;
    if value.is_finite() { f32::from_bits(bits) } else { canonical(value) }
}

/// An operation with flushed operands and result, saturated if asked for.
#[inline(always)]
pub fn with_mode<const N: usize>(values: [f32; N], mode: Mode, operation: impl Fn([f32; N]) -> f32) -> f32 {
    let values = if mode.flush { values.map(flushed) } else { values };
    let mut result = operation(values);
    if mode.flush {
        result = flushed(result);
    }
    if mode.saturate { saturated(result) } else { canonical(result) }
}

/// Between 0 and 1; what is no number is 0.
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

/// An integer from a number without a fraction: the nearest that there is.
pub fn to_int(whole: f64, signed: bool, bits: u32) -> u64 {
    if signed {
        let limit = i64::MAX >> (64 - bits);
        // A cast of Rust keeps to the limits of i64, and makes 0 of what is no number.
        (whole as i64).clamp(-limit - 1, limit) as u64
    } else {
        (whole as u64).min(u64::MAX >> (64 - bits))
    }
}

/// A float from an integer: the sum of its parts, rounded once.
pub fn from_int(value: i128, round: Round) -> f32 {
    let high = value as f64;
    rounded(high, (value - high as i128) as f64, round)
}

/// A number without a fraction.
pub fn integral(value: f64, round: Round) -> f64 {
    match round {
        Round::Nearest => value.round_ties_even(),
        Round::NearestAway => value.round(),
        Round::Zero => value.trunc(),
        Round::Down => value.floor(),
        Round::Up => value.ceil(),
    }
}
