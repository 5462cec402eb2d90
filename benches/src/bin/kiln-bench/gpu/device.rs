//! The device to measure.

use burn::tensor::Device;
use clap::ValueEnum;
use kiln::bench;
use kiln::config::{Backend, Config, Precision};
use kiln::device::{Peak, ResolvedDevice};
use kiln::optimizers::Optimizers;
use kiln::run::{TrainError, check_memory};
use kiln_model::{Decoder, Key, Layers, ModelConfig};

use crate::error::BenchError;

/// `--device`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DeviceName {
    Cuda,
    Wgpu,
    Cpu,
}

impl DeviceName {
    /// Returns the backend's name in a configuration. Steps on wgpu have none.
    pub(super) fn backend(self) -> Result<Backend, BenchError> {
        match self {
            DeviceName::Cuda if !cfg!(feature = "cuda") => Err(BenchError::NoCuda),
            DeviceName::Wgpu if !cfg!(feature = "wgpu") => Err(BenchError::NoWgpu),
            DeviceName::Cuda => Ok(Backend::Cuda),
            DeviceName::Wgpu | DeviceName::Cpu => Ok(Backend::Cpu),
        }
    }
}

pub(super) struct Chosen {
    pub(super) device: Device,
    pub(super) name: String,
    /// The resolved device, where FLOP/s by dtype are known.
    selected: Option<ResolvedDevice>,
}

impl Chosen {
    pub(super) fn new(name: DeviceName, precision: Precision) -> Result<Chosen, BenchError> {
        #[cfg(feature = "wgpu")]
        if name == DeviceName::Wgpu {
            return wgpu();
        }
        let mut config = Config::default();
        config.device.backend = name.backend()?;
        config.precision.compute = precision.into();
        let selected = ResolvedDevice::new(&config, &Layers::default(), None).map_err(TrainError::from)?;
        let (device, name) = (selected.device(), selected.describe());
        Ok(Chosen { device, name, selected: Some(selected) })
    }

    pub(super) fn check_memory(&self, config: &Config, model: &ModelConfig) -> Result<(), TrainError> {
        let Some(selected) = &self.selected else { return Ok(()) };
        let decoder = Decoder::new(&Layers::default(), model, Key::new(0), &kiln::device::plain())?;
        let optimizer = Optimizers::default().make(&config.optim)?;
        Ok(check_memory(config, model, &decoder, &optimizer, selected, None)?)
    }

    /// Checks that steps of `config` use no kernel that is wrong on this device, as every run does.
    pub(super) fn check_kernels(&self, config: &Config, model: &ModelConfig) -> Result<(), TrainError> {
        self.selected.as_ref().map_or(Ok(()), |selected| bench::check_kernels(config, model, selected))
    }

    pub(super) fn peak(&self, precision: Precision) -> Result<Option<Peak>, TrainError> {
        let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        self.selected
            .as_ref()
            .map(|selected| selected.peak(precision, None, 1, threads))
            .transpose()
            .map_err(TrainError::threads("threads that measure the peak of this machine"))
    }
}

#[cfg(feature = "wgpu")]
fn wgpu() -> Result<Chosen, BenchError> {
    let device = Device::wgpu(burn::tensor::DeviceKind::DefaultDevice);
    // Without a driver, wgpu panics.
    let identity = std::panic::catch_unwind(|| device.identity());
    let Ok(Some(identity)) = identity else { return Err(BenchError::NoGpu) };
    Ok(Chosen { name: format!("device: {}, through wgpu", identity.name), device, selected: None })
}
