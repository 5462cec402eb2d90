//! The CPU kernels, one file per operation.
//!
//! Results have the same bits for any number of threads: blocks depend only on the shapes, and their sums are added in
//! order. Work runs in the caller's rayon pool. `products` is implemented by `gemm` and `bf16`.

mod attention;
mod bf16;
mod cross_entropy;
mod dispatch;
mod dropout;
mod embedding;
mod experts;
mod gemm;
mod glu;
mod linear;
mod matrix;
mod parallel;
mod products;
mod residual;
mod rms_norm;
mod rotary;
mod router;
mod scalar;
mod squared_relu;
mod top_k;
mod transpose;
mod transpose_square;
mod uninit;
mod values;

pub use bf16::{BF16_CHOICE, bf16_instructions};
