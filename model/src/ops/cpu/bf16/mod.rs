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

use burn::tensor::DType;
use burn_flex::FlexTensor;
#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
pub use nowhere::{Left, Right, Unit};
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub use x86::{Left, Right, Unit};

/// The processor's instructions for a product of `tensors`, if all are bf16 and it has some.
pub fn unit_for<const N: usize>(tensors: [&FlexTensor; N]) -> Option<Unit> {
    Unit::get().filter(|_| tensors.iter().all(|tensor| tensor.dtype() == DType::BF16))
}
