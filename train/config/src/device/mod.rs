//! The device that holds the tensors: the CPU, or a GPU.
//!
//! [`ResolvedDevice`] is chosen from `device.backend` or `--device` (`flag`) and from the requirements of the
//! work (`request`), before anything is computed. For a GPU, everything that work on it needs is checked first,
//! and anything missing is an error, because burn and CubeCL panic without a driver.
//!
//! `cpu` has threads and the CPU's peak, `data_sheet` the specifications of NVIDIA's GPUs, `peak` the reference
//! for `mfu`, `kept_peak` its measurements by earlier starts, `memory` the available memory. For builds with
//! CUDA: `cuda` examines the driver and GPUs, `gpu` describes one GPU, `toolkit` checks NVIDIA's libraries,
//! which [`kiln_nvidia`] finds and loads, and `cupti` records the activity of a GPU. `kernel_pack` carries
//! cached kernels to other machines, `kernel_counts` counts the compiled ones, and `products` stores algorithms
//! of matrix products. For builds with wgpu, `wgpu` looks for an adapter. [`crate::world`] compares the choices
//! of ranks that are processes.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cuda")]
mod cupti;
mod data_sheet;
mod error;
mod flag;
#[cfg(feature = "cuda")]
mod gpu;
mod kept_peak;
mod kernel_counts;
#[cfg(feature = "cuda")]
mod kernel_pack;
mod memory;
mod peak;
#[cfg(feature = "cuda")]
mod products;
mod request;
mod resolved;
mod share;
mod tensors;
#[cfg(feature = "cuda")]
mod toolkit;
#[cfg(feature = "wgpu")]
mod wgpu;

pub use cpu::{cores, cores_of_machine, cpu_defaults, ranks_sharing_cores, threads_per_rank};
#[cfg(feature = "cuda")]
pub use cuda::examine;
pub use data_sheet::DataSheet;
pub use error::DeviceError;
pub use flag::DeviceFlag;
pub use flag::parse_backend;
#[cfg(feature = "cuda")]
pub use gpu::Gpu;
pub use kernel_counts::KernelCounts;
#[cfg(feature = "cuda")]
pub use kernel_pack::{Unpacked, pack, unpack};
pub use memory::Memory;
pub use peak::Peak;
#[cfg(feature = "cuda")]
pub use products::{check as check_products, folder as products_folder, keep as keep_products};
pub use request::DeviceRequest;
pub use resolved::Recording;
pub use resolved::{ResolvedDevice, count_gpus};
pub use share::share_gpu;
pub use tensors::{plain, tokens};
