//! Products of bf16 matrices with the processor's own instructions: the tiles of AMX, or the vectors of AVX512-BF16.
//!
//! Operands are packed into panels that both kinds of instructions read (`x86/pack.rs`). Sums are `f32` and run over
//! all of `k` in one order, so that a result does not depend on the number of threads. AMX and AVX512-BF16 use
//! different orders, so their results may differ in the last bit, like `f32` results between processors with and
//! without fused multiply-add.
//!
//! All work runs in the rayon pool of the caller.

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
mod unsupported;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod x86;

use std::sync::OnceLock;

use burn::tensor::DType;
use burn_flex::FlexTensor;

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
pub use unsupported::Bf16Gemm;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub use x86::Bf16Gemm;

/// The environment variable that selects the instructions for products of bf16; see [`bf16_instructions`].
pub const BF16_CHOICE: &str = "KILN_BF16";

/// Returns the name of the processor's instructions for products of bf16 tensors on the CPU, `AMX` or
/// `AVX512-BF16`; `None` if they are computed in `f32`. The environment variable [`BF16_CHOICE`] selects
/// them: `amx`, `avx512` or `none`. The default is AMX. Instructions that the processor lacks are not used.
pub fn bf16_instructions() -> Option<&'static str> {
    bf16_gemm().map(Bf16Gemm::name)
}

/// Returns the instructions for a product of `tensors`, if all are bf16 and the processor has such
/// instructions.
pub fn bf16_gemm_for<const N: usize>(tensors: [&FlexTensor; N]) -> Option<Bf16Gemm> {
    bf16_gemm().filter(|_| tensors.iter().all(|tensor| tensor.dtype() == DType::BF16))
}

/// Returns the instructions, which are the same throughout the process.
fn bf16_gemm() -> Option<Bf16Gemm> {
    static FOUND: OnceLock<Option<Bf16Gemm>> = OnceLock::new();
    *FOUND.get_or_init(|| Bf16Gemm::choose(std::env::var(BF16_CHOICE).as_deref().unwrap_or("")))
}
