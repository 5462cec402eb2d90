//! Attention's kernels: run on wgpu against the reference, and compiled for CUDA.

#[cfg(feature = "cuda")]
mod compiled;
#[cfg(feature = "wgpu")]
pub mod executed;
