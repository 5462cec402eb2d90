//! Products of bf16 matrices with the processor's own instructions: the tiles of AMX, or the vectors of AVX512-BF16.
//!
//! Operands are packed into panels that both kinds of instructions read (`x86/pack.rs`). Sums are `f32` and run over
//! all of `k` in one order, so that a result does not depend on the number of threads. AMX and AVX512-BF16 use
//! different orders, so their results may differ in the last bit, like `f32` results between processors with and
//! without fused multiply-add.
//!
//! All work runs in the rayon pool of the caller.

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
