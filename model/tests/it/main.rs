//! Integration tests of the crate, in one binary.

mod cache;
mod config;
#[cfg(feature = "wgpu")]
mod cube;
#[cfg(feature = "cube")]
mod cube_attention;
#[cfg(feature = "wgpu")]
mod cube_experts;
#[cfg(feature = "wgpu")]
mod cube_verify;
#[cfg(feature = "cuda")]
mod cublaslt;
mod decoder;
mod layers;
mod moe;
mod ops_attention;
mod ops_bf16;
mod ops_cross_entropy;
mod ops_dropout;
mod ops_embedding;
mod ops_experts;
mod ops_glu;
mod ops_linear;
mod ops_memory;
mod ops_residual;
mod ops_rms_norm;
mod ops_rotary;
mod ops_router;
mod ops_squared_relu;
mod ops_support;
mod ops_window;
#[cfg(all(feature = "cuda", feature = "wgpu"))]
mod planted;
mod probe;
mod verify_layers;
