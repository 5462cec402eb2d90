//! The floating-point types that kernels are written over.

use std::convert::identity;
use std::mem::MaybeUninit;
use std::ops::{Add, AddAssign, Div, Mul, MulAssign, Neg, Sub};

use burn::tensor::{Element, bf16, f16};
use bytemuck::Pod;

use super::transpose_square::{transpose_square, transpose_square_f32};

/// A float type of tensors, which kernels read and write.
pub trait Scalar: Element + Pod {
    /// Type in which kernels compute: `Self`, or `f32` for half precision.
    type Real: Real;

    fn real(self) -> Self::Real;
    fn nearest(value: Self::Real) -> Self;
}

macro_rules! scalar {
    ($type:ident: $real:ident, $to_real:expr, $nearest:expr) => {
        impl Scalar for $type {
            type Real = $real;

            #[inline(always)]
            fn real(self) -> $real {
                $to_real(self)
            }
            #[inline(always)]
            fn nearest(value: $real) -> Self {
                $nearest(value)
            }
        }
    };
}

scalar!(f32: f32, identity, identity);
scalar!(f64: f64, identity, identity);
scalar!(bf16: f32, f32_of_bf16, nearest_bf16);
scalar!(f16: f32, f16::to_f32, f16::from_f32);

#[inline(always)]
fn f32_of_bf16(value: bf16) -> f32 {
    f32::from_bits(u32::from(value.to_bits()) << 16)
}

/// Rounds to nearest, ties to even, without a branch, so that loops vectorise.
#[inline(always)]
fn nearest_bf16(value: f32) -> bf16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    // A NaN stays a NaN, even if only its lower half distinguishes it from infinity.
    let quiet = bits >> 16 | 0x40;
    bf16::from_bits(if value.is_nan() { quiet } else { rounded } as u16)
}

/// `f32` for training, or `f64` for tests with finite differences.
///
/// Kernels never fuse multiplication and addition, so that vectorised bodies and scalar tails round the same way.
pub trait Real:
    Scalar<Real = Self>
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + MulAssign
{
    const ZERO: Self;
    const ONE: Self;
    const NEG_INFINITY: Self;

    fn from_f64(value: f64) -> Self;
    fn sqrt(self) -> Self;
    fn ln(self) -> Self;
    fn exp(self) -> Self;
    fn tanh(self) -> Self;
    fn erf(self) -> Self;

    /// Transposes a square of 16 by 16 between matrices whose rows are `x_stride` and `y_stride` apart.
    fn transpose_square(x: &[Self], x_stride: usize, y: &mut [MaybeUninit<Self>], y_stride: usize);
}

macro_rules! real {
    ($type:ident, $exp:expr, $tanh:expr, $erf:expr, $transpose_square:path) => {
        impl Real for $type {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const NEG_INFINITY: Self = $type::NEG_INFINITY;

            #[inline(always)]
            fn from_f64(value: f64) -> Self {
                value as $type
            }
            #[inline(always)]
            fn sqrt(self) -> Self {
                $type::sqrt(self)
            }
            #[inline(always)]
            fn ln(self) -> Self {
                $type::ln(self)
            }
            #[inline(always)]
            fn exp(self) -> Self {
                $exp(self)
            }
            #[inline(always)]
            fn tanh(self) -> Self {
                $tanh(self)
            }
            #[inline(always)]
            fn erf(self) -> Self {
                $erf(self)
            }

            #[inline(always)]
            fn transpose_square(x: &[Self], x_stride: usize, y: &mut [MaybeUninit<Self>], y_stride: usize) {
                $transpose_square(x, x_stride, y, y_stride);
            }
        }
    };
}

real!(f32, exp_f32, tanh_f32, erf_f32, transpose_square_f32);
real!(f64, f64::exp, f64::tanh, libm::erf, transpose_square);

/// Computes eˣ without a branch, call or table, so that loops vectorise.
///
/// Reduces to `x = n·ln 2 + r` with `|r| <= ln 2 / 2`; for eʳ, uses the polynomial of Cephes' `expf` (Moshier), with
/// an error of about one unit in the last place. Subnormal results become zero, because they are slow.
#[inline(always)]
fn exp_f32(x: f32) -> f32 {
    /// Adding 1.5·2^23 rounds to an integer, in the low bits of the mantissa.
    const ROUND: f32 = 12_582_912.0;
    /// ln 2 in two parts, with few enough bits in the first for `n * LN_2_HIGH` to be exact.
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    /// Logarithms of the largest finite and the smallest normal number.
    const LARGEST: f32 = 88.722_84;
    const SMALLEST: f32 = -87.336_54;

    let rounded = x * std::f32::consts::LOG2_E + ROUND;
    let n = (rounded.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let n_float = rounded - ROUND;
    let r = (x - n_float * LN_2_HIGH) - n_float * LN_2_LOW;

    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 0.5;
    p = p * (r * r) + r + 1.0;

    // Two factors, because 2^128 alone is not representable while 2^128 times p may be.
    let half = n >> 1;
    let power = |n: i32| f32::from_bits((n.wrapping_add(127) as u32) << 23);
    let value = p * power(half) * power(n.wrapping_sub(half));

    // NaN fails both comparisons and has made `value` NaN.
    if x > LARGEST {
        f32::INFINITY
    } else if x < SMALLEST {
        0.0
    } else {
        value
    }
}

/// Computes tanh like [`exp_f32`]. Near 0, where `1 - 2 / (e²ˣ + 1)` loses digits, uses the polynomial of Cephes'
/// `tanhf` (Moshier), with an error of about two units in the last place.
#[inline(always)]
fn tanh_f32(x: f32) -> f32 {
    const NEAR: f32 = 0.625;

    let (size, square) = (x.abs(), x * x);
    let mut p = -5.704_988_7e-3;
    p = p * square + 2.063_909e-2;
    p = p * square - 5.373_971_6e-2;
    p = p * square + 1.333_144_2e-1;
    p = p * square - 3.333_328e-1;
    let near = p * square * x + x;
    let far = (1.0 - 2.0 / (exp_f32(2.0 * size) + 1.0)).copysign(x);
    if size < NEAR { near } else { far }
}

/// Computes the error function like [`exp_f32`], as `x · P(x²) / Q(x²)`, a minimax fit. The relative error is below
/// 4e-7, so results near 1 are not always monotonic.
#[inline(always)]
fn erf_f32(x: f32) -> f32 {
    /// Smallest argument for which the result rounds to 1.
    const LARGEST: f32 = 3.925;

    let square = x * x;
    let mut p = 2.046_010_2e-6;
    p = p * square + 2.848_447_2e-4;
    p = p * square + 3.772_620_3e-3;
    p = p * square + 5.276_952e-2;
    p = p * square + 1.905_954_3e-1;
    p = p * square + std::f32::consts::FRAC_2_SQRT_PI;
    let mut q = 3.804_765_6e-5;
    q = q * square + 1.163_873_9e-3;
    q = q * square + 1.498_334_1e-2;
    q = q * square + 1.141_834_1e-1;
    q = q * square + 5.022_435e-1;
    q = q * square + 1.0;
    let near = (x * p / q).clamp(-1.0, 1.0);
    // NaN fails the comparison and has made `near` NaN.
    if x.abs() >= LARGEST { 1.0f32.copysign(x) } else { near }
}

/// Accumulators of a reduction, which hide the latency of additions. Fixed, so that all machines add in one order.
const LANES: usize = 32;

#[inline(always)]
fn fold<T: Real>(mut lanes: [T; LANES], combine: impl Fn(T, T) -> T) -> T {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] = combine(lanes[i], lanes[i + width]);
        }
        width /= 2;
    }
    lanes[0]
}

/// Returns Σ aᵢ·bᵢ of two slices of equal length.
#[inline(always)]
pub fn dot<S: Scalar>(a: &[S], b: &[S]) -> S::Real {
    let mut lanes = [S::Real::ZERO; LANES];
    let ((a_body, a_tail), (b_body, b_tail)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a_body.iter().zip(b_body) {
        for i in 0..LANES {
            lanes[i] += a[i].real() * b[i].real();
        }
    }
    for (lane, (&a, &b)) in lanes.iter_mut().zip(a_tail.iter().zip(b_tail)) {
        *lane += a.real() * b.real();
    }
    fold(lanes, |a, b| a + b)
}

/// Returns Σ aᵢ·bᵢ·cᵢ of three slices of equal length.
#[inline(always)]
pub fn dot3<S: Scalar>(a: &[S], b: &[S], c: &[S]) -> S::Real {
    let mut lanes = [S::Real::ZERO; LANES];
    let ((a_body, a_tail), (b_body, b_tail)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let (c_body, c_tail) = c.as_chunks::<LANES>();
    for ((a, b), c) in a_body.iter().zip(b_body).zip(c_body) {
        for i in 0..LANES {
            lanes[i] += a[i].real() * b[i].real() * c[i].real();
        }
    }
    let tails = a_tail.iter().zip(b_tail).zip(c_tail);
    for (lane, ((&a, &b), &c)) in lanes.iter_mut().zip(tails) {
        *lane += a.real() * b.real() * c.real();
    }
    fold(lanes, |a, b| a + b)
}

/// Returns the largest value, skipping NaN, or negative infinity if there is none.
#[inline(always)]
pub fn max<T: Real>(a: &[T]) -> T {
    let larger = |a: T, b: T| if b > a { b } else { a };
    let mut lanes = [T::NEG_INFINITY; LANES];
    let (body, tail) = a.as_chunks::<LANES>();
    for a in body {
        for i in 0..LANES {
            lanes[i] = larger(lanes[i], a[i]);
        }
    }
    for (lane, &a) in lanes.iter_mut().zip(tail) {
        *lane = larger(*lane, a);
    }
    fold(lanes, larger)
}

/// Replaces each value by e^(value - shift), and returns the sum of the new values.
#[inline(always)]
pub fn exp_sum<T: Real>(a: &mut [T], shift: T) -> T {
    let mut lanes = [T::ZERO; LANES];
    let (body, tail) = a.as_chunks_mut::<LANES>();
    for a in body {
        for i in 0..LANES {
            a[i] = (a[i] - shift).exp();
            lanes[i] += a[i];
        }
    }
    for (lane, a) in lanes.iter_mut().zip(tail) {
        *a = (*a - shift).exp();
        *lane += *a;
    }
    fold(lanes, |a, b| a + b)
}
