//! The instructions for products of bf16 that this processor has.

use pulp::x86::V4;

use super::tiles::Tiles;
use super::vectors::Vectors;

#[derive(Clone, Copy, Debug)]
pub struct Bf16Gemm {
    /// AVX-512, which every processor with either kind of instructions has.
    pub(super) simd: V4,
    pub(super) kernel: Kernel,
}

/// Instructions that multiply two panels.
#[derive(Clone, Copy, Debug)]
pub enum Kernel {
    Tiles(Tiles),
    Vectors(Vectors),
}

impl Bf16Gemm {
    /// Returns the instructions called `choice`, if available: `amx` or an empty string for AMX, or `avx512`.
    ///
    /// AVX512-BF16 is not the default: on Intel processors, `f32` is at least as fast.
    pub fn choose(choice: &str) -> Option<Self> {
        let kernel = match choice {
            "" | "amx" => Kernel::Tiles(Tiles::try_new()?),
            "avx512" => Kernel::Vectors(Vectors::try_new()?),
            _ => return None,
        };
        Some(Bf16Gemm { simd: V4::try_new()?, kernel })
    }

    pub fn name(self) -> &'static str {
        match self.kernel {
            Kernel::Tiles(_) => "AMX",
            Kernel::Vectors(_) => "AVX512-BF16",
        }
    }
}
