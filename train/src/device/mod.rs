//! Where tensors live: the CPU, or a GPU.
//!
//! [`Selected`] settles it from `device.backend` or `--device` (`flag`) and from what the work asks for
//! (`demand`), before anything is computed. For a GPU, everything that work on it will need is looked for
//! first, and what is missing is an error that says so: burn and CubeCL panic without a driver, and name a
//! GPU where there is none.
//!
//! `cpu` is threads and what they reach, `peak` what `mfu` is held against, `memory` how much memory there is. For builds with CUDA: `cuda` looks at the driver and at GPUs,
//! `libraries` finds and loads what NVIDIA keeps in files of its own, `alias` gives one of these a second
//! name, `toolkit` goes through them, `gpu` is one GPU. For builds with wgpu, `wgpu` looks for anything that
//! it can use. `together` compares the choices of ranks that are processes.

#[cfg(feature = "cuda")]
mod alias;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod demand;
mod error;
mod flag;
#[cfg(feature = "cuda")]
mod gpu;
#[cfg(feature = "cuda")]
mod libraries;
mod memory;
mod peak;
mod together;
#[cfg(feature = "cuda")]
mod toolkit;
#[cfg(feature = "wgpu")]
mod wgpu;

#[cfg(feature = "wgpu")]
use burn::tensor::{DType, DeviceKind};
use burn::tensor::{Device, Int, Tensor, TensorData};

use crate::config::{Backend, CommBackend, Config, Precision};
use crate::place::Place;
use crate::train::TrainError;

pub use cpu::{ranks_sharing_cores, threads_per_rank};
#[cfg(feature = "cuda")]
pub use cuda::examine;
pub use demand::Demand;
pub use error::DeviceError;
pub use flag::DeviceFlag;
#[cfg(feature = "cuda")]
pub use gpu::Gpu;
pub use memory::Memory;
pub use peak::Peak;
pub(crate) use together::agree;

/// The device of a run, as far as this process is concerned.
#[derive(Clone, Debug, PartialEq)]
pub struct Selected {
    kind: Kind,
    /// Why this one and not the other.
    why: String,
}

#[derive(Clone, Debug, PartialEq)]
enum Kind {
    Cpu,
    #[cfg(feature = "cuda")]
    Cuda(Gpu),
    /// Whatever wgpu takes by default.
    #[cfg(feature = "wgpu")]
    Wgpu,
}

impl Selected {
    /// The device of a run.
    ///
    /// # Errors
    ///
    /// As for [`Selected::for_demand`].
    pub fn new(config: &Config, place: Option<&Place>) -> Result<Self, DeviceError> {
        Self::for_demand(&Demand::of_run(config), place)
    }

    /// The device that `demand` names or, if that is `auto`, an NVIDIA GPU if this process can do the
    /// work on one, else the CPU. Ranks that are threads share GPU 0; ranks that are processes, which
    /// have a place, take one each.
    ///
    /// # Errors
    ///
    /// The first thing that is missing, if `demand` insists on a GPU. For an NVIDIA GPU, nothing is asked of
    /// burn or CubeCL.
    pub fn for_demand(demand: &Demand, place: Option<&Place>) -> Result<Self, DeviceError> {
        let as_said = || format!("as {} says", demand.said_by);
        match demand.backend {
            Backend::Cpu => Ok(Self::cpu(as_said())),
            Backend::Cuda => Self::cuda(demand, place, as_said()),
            Backend::Wgpu => Self::wgpu(place, as_said()),
            Backend::Auto if matches!(demand.comm, CommBackend::Tcp | CommBackend::Mpi) => {
                Ok(Self::cpu(
                    "not a GPU: comm.backend moves what is in the memory of the CPU".to_owned(),
                ))
            }
            Backend::Auto => {
                let why = "not the CPU, since this GPU can be used".to_owned();
                Ok(Self::cuda(demand, place, why)
                    .unwrap_or_else(|error| Self::cpu(format!("not a GPU: {}", error.in_short()))))
            }
        }
    }

    /// The device of a run whose ranks have met already and move what is in the memory of the CPU.
    ///
    /// # Errors
    ///
    /// If the configuration insists on a GPU.
    pub(crate) fn for_joined(config: &Config) -> Result<Self, DeviceError> {
        match config.device.backend {
            Backend::Cpu => Ok(Self::cpu("as device.backend says".to_owned())),
            Backend::Auto => {
                Ok(Self::cpu(format!("not a GPU: {}", DeviceError::NoTransport.in_short())))
            }
            Backend::Cuda | Backend::Wgpu => Err(DeviceError::NoTransport),
        }
    }

    fn cpu(why: String) -> Self {
        Selected { kind: Kind::Cpu, why }
    }

    #[cfg(feature = "cuda")]
    fn cuda(demand: &Demand, place: Option<&Place>, why: String) -> Result<Self, DeviceError> {
        Ok(Selected { kind: Kind::Cuda(cuda::select(demand, place)?), why })
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda(_: &Demand, _: Option<&Place>, _: String) -> Result<Self, DeviceError> {
        Err(DeviceError::NotBuilt)
    }

    #[cfg(feature = "wgpu")]
    fn wgpu(place: Option<&Place>, why: String) -> Result<Self, DeviceError> {
        wgpu::check(place)?;
        Ok(Selected { kind: Kind::Wgpu, why })
    }

    #[cfg(not(feature = "wgpu"))]
    fn wgpu(_: Option<&Place>, _: String) -> Result<Self, DeviceError> {
        Err(DeviceError::WgpuNotBuilt)
    }

    /// burn's device; `.autodiff()` makes it one for training.
    pub fn device(&self) -> Device {
        match &self.kind {
            Kind::Cpu => plain(),
            #[cfg(feature = "cuda")]
            Kind::Cuda(gpu) => Device::cuda(gpu.index),
            #[cfg(feature = "wgpu")]
            Kind::Wgpu => Device::wgpu(DeviceKind::DefaultDevice),
        }
    }

    /// Whether it is a GPU.
    pub fn is_gpu(&self) -> bool {
        !matches!(self.kind, Kind::Cpu)
    }

    /// The memory of the GPU, if it is an NVIDIA GPU.
    pub(crate) fn gpu_memory(&self) -> Option<Memory> {
        match &self.kind {
            #[cfg(feature = "cuda")]
            Kind::Cuda(gpu) => Some(Memory { total: gpu.memory, free: gpu.free }),
            _ => None,
        }
    }

    /// Its number, if it is an NVIDIA GPU, among those that this process sees.
    #[cfg(feature = "cuda")]
    pub(crate) fn cuda_index(&self) -> Option<usize> {
        match &self.kind {
            Kind::Cuda(gpu) => Some(gpu.index),
            _ => None,
        }
    }

    /// Warns of GPUs that stay idle, for work whose ranks are threads: these share one.
    pub fn warn_of_idle_gpus(&self) {
        let visible = match &self.kind {
            #[cfg(feature = "cuda")]
            Kind::Cuda(gpu) => gpu.visible,
            _ => 0,
        };
        if let Some(warning) = idle(visible) {
            tracing::warn!("{warning}");
        }
    }

    /// What `ranks` ranks could reach. A CPU's peak is measured, with `threads`
    /// threads for each rank of this node, and so is that of what wgpu finds, in f32; an NVIDIA GPU's is
    /// that of its data sheet. The other nodes are taken to be like this one.
    ///
    /// # Errors
    ///
    /// If the system does not start the threads.
    pub fn peak(
        &self,
        precision: Precision,
        place: Option<&Place>,
        ranks: usize,
        threads: usize,
    ) -> Result<Peak, TrainError> {
        match &self.kind {
            Kind::Cpu => {
                let here = place.map_or(ranks, |place| place.local_world_size.max(1));
                Peak::measured(precision, threads * here, ranks as f64 / here as f64)
                    .map_err(TrainError::threads("threads that measure the peak of this machine"))
            }
            #[cfg(feature = "cuda")]
            Kind::Cuda(gpu) => {
                let gpus = if place.is_some() { ranks } else { 1 };
                Ok(Peak::given(gpu.peak_flops(precision) * gpus as f64))
            }
            #[cfg(feature = "wgpu")]
            Kind::Wgpu => Ok(Peak::given(cpu::measure_flops_of(&self.device(), DType::F32))),
        }
    }

    /// What tells an NVIDIA GPU apart from those of other processes; nothing for others.
    fn id(&self) -> [u8; 16] {
        match &self.kind {
            #[cfg(feature = "cuda")]
            Kind::Cuda(gpu) => gpu.uuid,
            _ => [0; 16],
        }
    }

    /// One line: which device, and why not the other.
    pub fn describe(&self) -> String {
        match &self.kind {
            Kind::Cpu => format!("device: CPU, {}", self.why),
            #[cfg(feature = "cuda")]
            Kind::Cuda(gpu) => format!("device: GPU {gpu}, {}", self.why),
            #[cfg(feature = "wgpu")]
            Kind::Wgpu => format!("device: what wgpu finds, {}", self.why),
        }
    }
}

/// Says that all but one of `visible` GPUs have nothing to do.
fn idle(visible: usize) -> Option<String> {
    let idle = match visible {
        0 | 1 => return None,
        2 => "GPU 1 stays".to_owned(),
        visible => format!("GPUs 1 to {} stay", visible - 1),
    };
    Some(format!(
        "{idle} idle: ranks that are threads share GPU 0. `kiln launch --nproc-per-node gpu -- …` starts a rank \
         for each GPU; CUDA_VISIBLE_DEVICES hides those that are not meant"
    ))
}

/// GPUs that this process sees.
///
/// # Errors
///
/// Why there are none, or why they cannot be counted.
pub fn count_gpus() -> Result<usize, DeviceError> {
    #[cfg(feature = "cuda")]
    return cuda::count_visible();
    #[cfg(not(feature = "cuda"))]
    Err(DeviceError::NotBuilt)
}

/// The device of plain computation on the CPU; `.autodiff()` makes it one for training.
pub fn plain() -> Device {
    Device::flex()
}

/// Token ids `[rows, seq_len]` as a tensor.
pub fn tokens(ids: Vec<i32>, rows: usize, seq_len: usize, device: &Device) -> Tensor<2, Int> {
    Tensor::from_data(TensorData::new(ids, [rows, seq_len]), device)
}

#[cfg(test)]
mod tests {
    use super::idle;

    #[test]
    fn gpus_that_threads_leave_idle_are_told() {
        assert_eq!((idle(0), idle(1)), (None, None));
        assert!(idle(2).is_some_and(|text| text.starts_with("GPU 1 stays idle: ")));
        let text = idle(8).unwrap_or_default();
        assert!(text.starts_with("GPUs 1 to 7 stay idle: "), "{text}");
        assert!(text.contains("kiln launch --nproc-per-node gpu"), "{text}");
    }
}
