//! `kiln bench gpu`: every kernel against what the device could do, and whole steps, beside PyTorch's in
//! the same run if there is one.
//!
//! `clock` times what a device does; `shapes` are the sizes of the operations, `kernels` the operations
//! with what they have to move or compute, `table` the figures for people and programs; `steps` are the
//! end-to-end rows, and `peer` runs PyTorch.

mod clock;
mod kernels;
mod peer;
mod shapes;
mod steps;
mod table;

use std::path::PathBuf;

use burn::tensor::{DType, Device};
use clap::{Args, ValueEnum};

use self::clock::Clock;
use self::kernels::Bench;
use self::peer::Peer;
use self::shapes::Shapes;
use self::steps::{EndToEnd, Row as StepRow};
use self::table::{GpuTable, KernelRow};
use super::step::{checked, counted};
use super::{BenchError, check_counts, median};
use crate::config::{self, Backend, Config, Precision};
use crate::device::{Peak, Selected};
use crate::error::TrainError;

pub use self::table::{GpuTable as Table, KernelRow as Kernel, StepPair, Work};

/// What to measure.
#[derive(Args, Clone, Debug)]
pub struct GpuArgs {
    /// Where: an NVIDIA GPU, or to try the command out, any GPU through wgpu, or the CPU.
    #[arg(long, value_enum, default_value_t = DeviceName::Cuda)]
    device: DeviceName,
    /// Measure what is called so, "kernels", "steps", or what starts so if NAME ends in *; may be given
    /// several times [default: everything].
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Small shapes and few calls: to see that everything runs.
    #[arg(long)]
    quick: bool,
    /// Dtype of the steps and of the large shapes [default: bf16 on NVIDIA GPUs, else f32].
    #[arg(long, value_enum)]
    dtype: Option<DTypeName>,
    /// Measure steps of this configuration, and nothing else.
    #[arg(long, conflicts_with = "only")]
    config: Option<PathBuf>,
    /// Change one value of the configuration; may be given several times.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE", requires = "config")]
    overrides: Vec<String>,
    /// A Python with PyTorch, which measures the same by turns.
    #[arg(long, value_name = "PYTHON")]
    peer: Option<PathBuf>,
    /// The script that the peer runs.
    #[arg(long, default_value = "benches/peers/torch_fsdp.py", value_name = "FILE")]
    peer_script: PathBuf,
    /// How many times Kiln and the peer take turns at a row of steps.
    #[arg(long, default_value_t = 1)]
    pairs: usize,
    /// Steps that are timed [default: 10, or 2 if it is to be quick].
    #[arg(long)]
    steps: Option<usize>,
    /// Fail unless every row of steps is at least as fast as the peer's, and holds no more memory.
    #[arg(long, requires = "peer")]
    bars: bool,
    /// Fail if the model FLOP/s of preset 1b stay below this share of the device's, in percent.
    #[arg(long, value_name = "PERCENT")]
    least_mfu: Option<f64>,
    /// Print JSON instead of tables.
    #[arg(long)]
    json: bool,
}

/// `--device`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum DeviceName {
    Cuda,
    Wgpu,
    Cpu,
}

/// `--dtype`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum DTypeName {
    F32,
    Bf16,
}

impl From<DTypeName> for Precision {
    fn from(name: DTypeName) -> Self {
        match name {
            DTypeName::F32 => Precision::F32,
            DTypeName::Bf16 => Precision::Bf16,
        }
    }
}

/// Groups of rows, as `--only` knows them.
const KERNELS: &str = "kernels";
const STEPS: &str = "steps";

/// Whether `wanted` names the row `name` of a group.
fn is_called(name: &str, group: &str, wanted: &str) -> bool {
    let starts_so = |start: &str| name.starts_with(start);
    wanted == name || wanted == group || wanted.strip_suffix('*').is_some_and(starts_so)
}

/// The device at work.
struct Chosen {
    device: Device,
    /// In words.
    name: String,
    /// Where FLOP/s of the device are known: those of a dtype.
    selected: Option<Selected>,
}

impl Chosen {
    /// FLOP/s that the device could reach in products of matrices, where that is known.
    fn peak(&self, precision: Precision) -> Result<Option<Peak>, TrainError> {
        let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        self.selected
            .as_ref()
            .map(|selected| selected.peak(precision, None, 1, threads))
            .transpose()
            .map_err(TrainError::threads("threads that measure the peak of this machine"))
    }
}

/// What was said of a measurement, and whether it holds the bars.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Said {
    /// For people or programs.
    pub text: String,
    /// Whether nothing failed and every bar that was asked for is reached.
    pub passed: bool,
}

impl GpuArgs {
    /// Measures; returns what to say. A row that fails is said to have, and does not keep the others
    /// from being measured.
    pub fn run(self) -> Result<Said, TrainError> {
        let (kernel_shapes, rows) = self.plan()?;
        let chosen = self.choose()?;
        let precision = self.precision();
        if precision == Precision::Bf16 && !chosen.device.supports_dtype(DType::BF16) {
            return Err(BenchError::NoDType { dtype: "bf16" }.into());
        }
        let peer = self.peer()?;
        let mut table = GpuTable::new(chosen.name.clone());
        let clock = Clock { device: chosen.device.clone(), quick: self.quick };
        if !kernel_shapes.is_empty() {
            table.copy_bytes_per_s = kernels::copy_rate(&clock)?;
        }
        for shapes in &kernel_shapes {
            let peak = chosen.peak(shapes.precision)?.map(|peak| peak.flops());
            let wanted = |name: &str| self.wants(name, KERNELS);
            let (mut timed, failures) = Bench { clock: &clock, shapes }.run(&wanted);
            table.failures.extend(failures);
            match peer.as_ref().map(|peer| peer.kernels(shapes, self.quick)) {
                None => {}
                Some(Ok(theirs)) => {
                    timed.iter_mut().for_each(|row| row.peer_s = theirs.get(&row.name).copied());
                }
                Some(Err(error)) => table.failures.push(error.to_string()),
            }
            let finish = |row: KernelRow| row.held_against(table.copy_bytes_per_s, peak);
            table.kernels.extend(timed.into_iter().map(finish));
        }
        clock.release();
        let run = EndToEnd { chosen: &chosen, peer: peer.as_ref(), pairs: self.pairs };
        let steps = counted(self.steps.unwrap_or(if self.quick { 2 } else { 10 }), self.warmup())?;
        for row in rows {
            table.steps.push(run.row(row, steps));
            clock.release();
        }
        table.judge(self.bars, self.least_mfu);
        let text = if self.json { table.to_json() } else { table.to_text() };
        Ok(Said { text, passed: table.failures.is_empty() })
    }

    /// What is to be measured.
    fn plan(&self) -> Result<(Vec<Shapes>, Vec<StepRow>), TrainError> {
        check_counts(&[("--pairs", self.pairs), ("--steps", self.steps.unwrap_or(1))])?;
        if self.peer.is_some() && self.device == DeviceName::Wgpu {
            return Err(BenchError::NoPeer.into());
        }
        let backend = match self.device {
            DeviceName::Cuda if !cfg!(feature = "cuda") => return Err(BenchError::NoCuda.into()),
            DeviceName::Wgpu if !cfg!(feature = "wgpu") => return Err(BenchError::NoWgpu.into()),
            DeviceName::Cuda => Backend::Cuda,
            DeviceName::Wgpu | DeviceName::Cpu => Backend::Cpu,
        };
        if let Some(path) = &self.config {
            let mut config = config::load(path, &self.overrides)?;
            config.device.backend = backend;
            config.train.ranks = 1;
            let model = checked(&mut config)?;
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            return Ok((Vec::new(), vec![StepRow { name, config, model }]));
        }
        let rows = StepRow::all(self.precision(), self.quick, backend)?;
        let shapes = Shapes::all(self.precision(), self.quick);
        let kernels = kernels::NAMES.iter().map(|name| ((*name).to_owned(), KERNELS));
        let known: Vec<_> =
            kernels.chain(rows.iter().map(|row| (row.name.clone(), STEPS))).collect();
        for wanted in &self.only {
            if !known.iter().any(|(name, group)| is_called(name, group, wanted)) {
                let mut rows = vec![KERNELS.to_owned(), STEPS.to_owned()];
                rows.extend(known.into_iter().map(|(name, _)| name));
                return Err(BenchError::NoRow { wanted: wanted.clone(), rows }.into());
            }
        }
        let some = kernels::NAMES.iter().any(|name| self.wants(name, KERNELS));
        let shapes = if some { shapes } else { Vec::new() };
        Ok((shapes, rows.into_iter().filter(|row| self.wants(&row.name, STEPS)).collect()))
    }

    /// Whether the row `name` of a group is to be measured.
    fn wants(&self, name: &str, group: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|wanted| is_called(name, group, wanted))
    }

    fn precision(&self) -> Precision {
        match (self.dtype, self.device) {
            (Some(name), _) => name.into(),
            (None, DeviceName::Cuda) => Precision::Bf16,
            (None, _) => Precision::F32,
        }
    }

    fn warmup(&self) -> usize {
        if self.quick { 1 } else { 3 }
    }

    fn choose(&self) -> Result<Chosen, TrainError> {
        let mut config = Config::default();
        config.device.backend = match self.device {
            DeviceName::Wgpu => return Ok(wgpu()?),
            DeviceName::Cuda => Backend::Cuda,
            DeviceName::Cpu => Backend::Cpu,
        };
        config.precision.compute = self.precision().into();
        let selected = Selected::new(&config, None)?;
        let (device, name) = (selected.device(), selected.describe());
        Ok(Chosen { device, name, selected: Some(selected) })
    }

    fn peer(&self) -> Result<Option<Peer>, BenchError> {
        let Some(python) = &self.peer else { return Ok(None) };
        let cuda = self.device == DeviceName::Cuda;
        Peer::new(python.clone(), self.peer_script.clone(), cuda).map(Some)
    }
}

#[cfg(feature = "wgpu")]
fn wgpu() -> Result<Chosen, BenchError> {
    let device = Device::wgpu(burn::tensor::DeviceKind::DefaultDevice);
    // Without a driver, wgpu panics.
    let identity = std::panic::catch_unwind(|| device.identity());
    let Ok(Some(identity)) = identity else {
        return Err(BenchError::Device { reason: "wgpu finds no GPU".to_owned() });
    };
    Ok(Chosen { name: format!("device: {}, through wgpu", identity.name), device, selected: None })
}

#[cfg(not(feature = "wgpu"))]
fn wgpu() -> Result<Chosen, BenchError> {
    Err(BenchError::NoWgpu)
}
