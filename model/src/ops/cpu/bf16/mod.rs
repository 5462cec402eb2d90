//! Products of bf16 matrices with AMX tiles or AVX512-BF16 vectors.
//!
//! Sums are `f32` in one order, whatever the number of threads. AMX and AVX512-BF16 use different orders, so their
//! results may differ in the last bit.

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

/// Environment variable that selects the instructions for products of bf16; see [`bf16_instructions`].
pub const BF16_CHOICE: &str = "KILN_BF16";

/// Returns the CPU's instructions for products of bf16, `AMX` or `AVX512-BF16`; `None` if computed in `f32`.
///
/// The environment variable [`BF16_CHOICE`] selects `amx` (default), `avx512` or `none`. Instructions that the
/// processor lacks are not used.
pub fn bf16_instructions() -> Option<&'static str> {
    bf16_gemm().map(Bf16Gemm::name)
}

/// Returns the instructions for a product of `tensors`, if all are bf16 and the processor has such instructions.
pub fn bf16_gemm_for<const N: usize>(tensors: [&FlexTensor; N]) -> Option<Bf16Gemm> {
    bf16_gemm().filter(|_| tensors.iter().all(|tensor| tensor.dtype() == DType::BF16))
}

fn bf16_gemm() -> Option<Bf16Gemm> {
    static FOUND: OnceLock<Option<Bf16Gemm>> = OnceLock::new();
    *FOUND.get_or_init(|| Bf16Gemm::choose(std::env::var(BF16_CHOICE).as_deref().unwrap_or("")))
}
