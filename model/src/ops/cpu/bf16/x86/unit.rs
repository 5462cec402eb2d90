//! Which instructions this processor has.

use std::sync::OnceLock;

use pulp::x86::V4;

use super::product::Kernel;
use super::tiles::Tiles;
use super::vectors::Vectors;
use crate::ops::BF16_CHOICE;

/// The processor's instructions for products of bf16.
#[derive(Clone, Copy, Debug)]
pub struct Unit {
    /// Both kinds come with it.
    pub(super) simd: V4,
    pub(super) kernel: Kernel,
}

impl Unit {
    /// AMX, or what [`BF16_CHOICE`] says, if the processor has it. It is the same for the whole process.
    ///
    /// AVX512-BF16 has to be chosen: on Intel's processors, its products take as long as or longer than those of
    /// `f32`.
    pub fn get() -> Option<Unit> {
        static FOUND: OnceLock<Option<Unit>> = OnceLock::new();
        *FOUND.get_or_init(|| {
            let kernel = match std::env::var(BF16_CHOICE).as_deref() {
                Err(_) | Ok("" | "amx") => Kernel::Tiles(Tiles::try_new()?),
                Ok("avx512") => Kernel::Vectors(Vectors::try_new()?),
                Ok(_) => return None,
            };
            Some(Unit { simd: V4::try_new()?, kernel })
        })
    }

    /// The name of the instructions.
    pub fn name(self) -> &'static str {
        match self.kernel {
            Kernel::Tiles(_) => "AMX",
            Kernel::Vectors(_) => "AVX512-BF16",
        }
    }
}
