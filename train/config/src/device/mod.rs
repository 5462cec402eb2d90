//! The device that holds the tensors: the CPU, or a GPU.
//!
//! [`ResolvedDevice`] is chosen before anything is computed. For a GPU, every requirement is checked first, because
//! burn and CubeCL panic without a driver.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cuda")]
mod cupti;
mod error;
mod gpu;
#[cfg(feature = "cuda")]
mod kernel_pack;
mod memory;
mod peak;
#[cfg(feature = "cuda")]
mod products;
mod request;
mod resolved;
#[cfg(feature = "cuda")]
mod toolkit;

pub use cpu::{cores, cores_of_machine, cpu_defaults, plain, ranks_sharing_cores, threads_per_rank, tokens};
#[cfg(feature = "cuda")]
pub use cuda::examine;
pub use error::DeviceError;
pub use gpu::DataSheet;
#[cfg(feature = "cuda")]
pub use gpu::Gpu;
#[cfg(feature = "cuda")]
pub use kernel_pack::{Unpacked, pack, unpack};
pub use memory::Memory;
pub use peak::Peak;
#[cfg(feature = "cuda")]
pub use products::{check as check_products, folder as products_folder, keep as keep_products};
pub use request::{DeviceFlag, DeviceRequest, parse_backend, share_gpu};
pub use resolved::{KernelCounts, Recording, ResolvedDevice, count_gpus};
