//! The CPU kernels, one file per operation.
//!
//! A kernel gives the same bits for any number of threads: work is cut into blocks whose size depends only on the
//! shapes, every block has its own output, and sums across blocks are computed in the order of the blocks. Work runs
//! in the rayon pool of the caller.
//!
//! Helpers of the operations: `parallel` cuts work into blocks, `scalar` defines the float types, `dispatch` selects
//! one of them, `values` and `matrix` are views of tensors. `products` is the interface of matrix multiplication,
//! implemented by `gemm` and `bf16`.

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
