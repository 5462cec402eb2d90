//! The kernels of attention: run on wgpu and compared with the reference, and compiled for CUDA.

#[cfg(feature = "cuda")]
mod compiled;
#[cfg(feature = "wgpu")]
pub mod executed;
