//! Instructions of x86 processors.

mod instructions;
mod pack;
mod product;
mod tiles;
mod vectors;

pub use instructions::Bf16Gemm;
