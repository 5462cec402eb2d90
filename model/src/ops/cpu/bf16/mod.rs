//! Products of bf16 matrices by the processor's own instructions for them: the tiles of AMX, or the
//! vectors of AVX512-BF16.
//!
//! Operands are packed into panels that both kinds of instructions read (`x86/pack.rs`). Sums are `f32` and
//! run over all of `k` in one order, so that a result does not depend on the number of threads. AMX and
//! AVX512-BF16 differ in that order, and so in the last bit of a result, as processors with and without fused
//! multiplication do in `f32`.
//!
//! Everything runs on the rayon pool of the caller.

mod choice;
#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
mod unsupported;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod x86;

pub use choice::{BF16_CHOICE, bf16_gemm_for, bf16_instructions};
#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
pub use unsupported::Bf16Gemm;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub use x86::Bf16Gemm;
