//! The instructions for products of bf16 that this processor has.

use pulp::x86::V4;

use super::tiles::Tiles;
use super::vectors::Vectors;

/// The processor's instructions for products of bf16.
#[derive(Clone, Copy, Debug)]
pub struct Bf16Gemm {
    /// AVX-512, which every processor with either kind of instructions has.
    pub(super) simd: V4,
    pub(super) kernel: Kernel,
}

/// The instructions that multiply two panels.
#[derive(Clone, Copy, Debug)]
pub enum Kernel {
    /// AMX.
    Tiles(Tiles),
    /// AVX512-BF16.
    Vectors(Vectors),
}

impl Bf16Gemm {
    /// Returns the instructions called `choice`, if the processor has them: `amx` or an empty string for AMX,
    /// `avx512` for AVX512-BF16.
    ///
    /// AVX512-BF16 must be chosen explicitly: on Intel processors, products with it take as long as products of
    /// `f32`, or longer.
    pub fn choose(choice: &str) -> Option<Self> {
        let kernel = match choice {
            "" | "amx" => Kernel::Tiles(Tiles::try_new()?),
            "avx512" => Kernel::Vectors(Vectors::try_new()?),
            _ => return None,
        };
        Some(Bf16Gemm { simd: V4::try_new()?, kernel })
    }

    /// Returns the name of the instructions.
    pub fn name(self) -> &'static str {
        match self.kernel {
            Kernel::Tiles(_) => "AMX",
            Kernel::Vectors(_) => "AVX512-BF16",
        }
    }
}
