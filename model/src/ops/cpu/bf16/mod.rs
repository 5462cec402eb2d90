//! Products of bf16 matrices by the processor's own instructions for them: the tiles of AMX, or the
//! vectors of AVX512-BF16.
//!
//! Operands are packed into panels that both read (`x86/pack.rs`); sums are `f32`, over all of `k` in one order,
//! so that a result does not depend on the number of threads. The two differ in that order, and so in the
//! last bit of a result, as processors with and without fused multiplication do in `f32`.
//!
//! Everything runs on the rayon pool of the caller.

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
mod nowhere;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod x86;

use burn::tensor::{DType, bf16};
use burn_flex::FlexTensor;
#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
pub use nowhere::{Left, Right, Unit};
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub use x86::{Left, Right, Unit};

/// The processor's instructions for a product of `tensors`, if all are bf16 and it has some.
pub fn unit_for<const N: usize>(tensors: [&FlexTensor; N]) -> Option<Unit> {
    Unit::get().filter(|_| tensors.iter().all(|tensor| tensor.dtype() == DType::BF16))
}

/// What a product of bf16 can be written to.
pub trait Rounded: Copy + Send {
    /// The nearest value.
    fn nearest(sum: f32) -> Self;
    /// The value.
    fn value(self) -> f32;
}

impl Rounded for f32 {
    #[inline(always)]
    fn nearest(sum: f32) -> f32 {
        sum
    }

    #[inline(always)]
    fn value(self) -> f32 {
        self
    }
}

impl Rounded for bf16 {
    /// To nearest, ties to even, without a branch, so that loops over it vectorise.
    #[inline(always)]
    fn nearest(sum: f32) -> bf16 {
        let bits = sum.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        // A NaN stays one, also if what tells it from infinity is in the lower half.
        let quiet = bits >> 16 | 0x40;
        bf16::from_bits(if sum.is_nan() { quiet } else { rounded } as u16)
    }

    #[inline(always)]
    fn value(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
}
