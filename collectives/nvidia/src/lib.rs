//! Finds and loads NVIDIA's libraries, and caches the kernels that NVRTC compiles.
//!
//! [`Places`] lists folders. With feature `cuda`, `libraries` loads a library so that cudarc and CubeCL find it,
//! `nvrtc` loads the compiler, and `kernel_cache` keeps compiled kernels for later processes that call
//! [`prepare_compiler`].

#[cfg(feature = "cuda")]
mod alias;
#[cfg(feature = "cuda")]
pub mod kernel_cache;
#[cfg(feature = "cuda")]
pub mod kernel_files;
#[cfg(feature = "cuda")]
pub mod libraries;
#[cfg(feature = "cuda")]
pub mod nvrtc;
mod places;

#[cfg(feature = "cuda")]
pub use places::reason;
pub use places::{Lookup, Places, cache_folder, environment};

/// Loads NVRTC with its cache of kernels, for programs such as kernel tests. Does nothing without feature `cuda`, or if
/// NVRTC is not installed.
pub fn prepare_compiler() {
    #[cfg(feature = "cuda")]
    {
        static ONCE: std::sync::Once = std::sync::Once::new();
        ONCE.call_once(|| {
            if let Err(missing) = nvrtc::load(vec!["libnvrtc.so.13", "libnvrtc.so.12"]) {
                tracing::debug!("{} not found in {}", missing.names, missing.places);
            }
        });
    }
}
