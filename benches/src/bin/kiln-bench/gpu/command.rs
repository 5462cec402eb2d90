//! The command `kiln-bench gpu`: selects the rows to measure, and their order.

use std::path::PathBuf;

use burn::tensor::DType;
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use kiln::bench::check_counts;
use kiln::config::{self, Precision};
use kiln::run::TrainError;
use kiln_shard::Recompute;

use super::clock::Clock;
use super::device::{Chosen, DeviceName};
use super::kernels::{self, Bench};
use super::peer::Peer;
use super::predicted;
use super::shapes::Shapes;
use super::steps::{EndToEnd, Row as StepRow};
use super::table::{GpuTable, KernelRow};
use crate::error::BenchError;
use crate::step::{checked, counted};

/// The arguments of `kiln-bench gpu`.
#[derive(Args, Clone, Debug)]
pub struct GpuArgs {
    /// Device to measure: an NVIDIA GPU or, to try the command, any GPU through wgpu, or the CPU.
    #[arg(long, value_enum, default_value_t = DeviceName::Cuda)]
    device: DeviceName,
    /// Measure only the row NAME, the group "kernels" or "steps", or rows that start with NAME if it ends
    /// in *; may be given several times [default: everything].
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Use small shapes and few calls, to check that everything runs.
    #[arg(long)]
    quick: bool,
    /// Dtype of the steps and of the large shapes [default: bf16 on NVIDIA GPUs, else f32].
    #[arg(long, value_parser = PossibleValuesParser::new(["f32", "bf16"]).map(|name| precision_of(&name)))]
    dtype: Option<Precision>,
    /// Measure steps of this configuration, and nothing else.
    #[arg(long, conflicts_with = "only")]
    config: Option<PathBuf>,
    /// Change one value of the configuration; may be given several times.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE", requires = "config")]
    overrides: Vec<String>,
    /// Python with PyTorch, which runs the same measurements, alternating with Kiln.
    #[arg(long, value_name = "PYTHON")]
    peer: Option<PathBuf>,
    /// Let PyTorch compute operation by operation, without `torch.compile`.
    #[arg(long, requires = "peer")]
    peer_eager: bool,
    /// Script that the peer runs.
    #[arg(long, default_value = "benches/peers/torch_fsdp.py", value_name = "FILE")]
    peer_script: PathBuf,
    /// Number of times that Kiln and the peer alternate at a row of steps.
    #[arg(long, default_value_t = 1)]
    pairs: usize,
    /// Timed steps [default: 10, or 2 with --quick].
    #[arg(long)]
    steps: Option<usize>,
    /// Output of benches/predict.sh, to be shown next to the measured steps.
    #[arg(long, value_name = "FILE")]
    predicted: Option<PathBuf>,
    /// Fail unless every row of steps is at least as fast as the peer's, and holds no more memory.
    #[arg(long, requires = "peer")]
    bars: bool,
    /// Fail if the model FLOP/s of preset 1b stay below this share of the device's, in percent.
    #[arg(long, value_name = "PERCENT")]
    least_mfu: Option<f64>,
    /// Measure steps without checking their kernels first.
    #[arg(long)]
    unchecked: bool,
    /// Print JSON instead of tables.
    #[arg(long)]
    json: bool,
}

fn precision_of(name: &str) -> Precision {
    if name == "bf16" { Precision::Bf16 } else { Precision::F32 }
}

/// Groups of rows that `--only` accepts.
const KERNELS: &str = "kernels";
const STEPS: &str = "steps";

/// Returns whether `wanted`, a value of `--only`, selects the row `name` of a group.
fn is_called(name: &str, group: &str, wanted: &str) -> bool {
    let starts_so = |start: &str| name.starts_with(start);
    wanted == name || wanted == group || wanted.strip_suffix('*').is_some_and(starts_so)
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Said {
    pub text: String,
    pub passed: bool,
}

impl GpuArgs {
    /// Measures all rows, and reports failed ones as failed.
    pub fn run(self) -> Result<Said, BenchError> {
        let (kernel_shapes, rows) = self.plan()?;
        let precision = self.precision();
        let chosen = Chosen::new(self.device, precision)?;
        if precision == Precision::Bf16 && !chosen.device.supports_dtype(DType::BF16) {
            return Err(BenchError::NoDType { dtype: "bf16" });
        }
        let peer = self.peer()?;
        let predicted = self.predicted.as_deref().map(predicted::read).transpose()?.unwrap_or_default();
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
        let run = EndToEnd { chosen: &chosen, peer: peer.as_ref(), pairs: self.pairs, predicted };
        let steps = counted(self.steps.unwrap_or(if self.quick { 2 } else { 10 }), self.warmup())?;
        for row in rows {
            table.steps.push(run.row(row, steps));
            clock.release();
        }
        table.judge(self.bars, self.least_mfu);
        let text = if self.json { table.to_json() } else { table.to_text() };
        Ok(Said { text, passed: table.failures.is_empty() })
    }

    fn plan(&self) -> Result<(Vec<Shapes>, Vec<StepRow>), BenchError> {
        check_counts(&[("--pairs", self.pairs), ("--steps", self.steps.unwrap_or(1))])?;
        if self.peer.is_some() && self.device == DeviceName::Wgpu {
            return Err(BenchError::NoPeer);
        }
        let backend = self.device.backend()?;
        if let Some(path) = &self.config {
            let mut config = config::load(path, &self.overrides).map_err(TrainError::from)?;
            config.device.backend = backend;
            config.train.ranks = 1;
            // The memory of the GPU is not known yet: `auto` takes the way that needs least.
            config.shard.recompute = config.shard.recompute.given().unwrap_or(Recompute::Block).into();
            let model = checked(&mut config)?;
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            config.device.verify_kernels &= !self.unchecked;
            return Ok((Vec::new(), vec![StepRow { name, config, model }]));
        }
        let mut rows = StepRow::all(self.precision(), self.quick, backend)?;
        rows.iter_mut().for_each(|row| row.config.device.verify_kernels &= !self.unchecked);
        let shapes = Shapes::all(self.precision(), self.quick);
        let kernels = kernels::NAMES.iter().map(|name| ((*name).to_owned(), KERNELS));
        let known: Vec<_> = kernels.chain(rows.iter().map(|row| (row.name.clone(), STEPS))).collect();
        for wanted in &self.only {
            if !known.iter().any(|(name, group)| is_called(name, group, wanted)) {
                let mut rows = vec![KERNELS.to_owned(), STEPS.to_owned()];
                rows.extend(known.into_iter().map(|(name, _)| name));
                return Err(BenchError::NoRow { wanted: wanted.clone(), rows });
            }
        }
        let some = kernels::NAMES.iter().any(|name| self.wants(name, KERNELS));
        let shapes = if some { shapes } else { Vec::new() };
        Ok((shapes, rows.into_iter().filter(|row| self.wants(&row.name, STEPS)).collect()))
    }

    fn wants(&self, name: &str, group: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|wanted| is_called(name, group, wanted))
    }

    fn precision(&self) -> Precision {
        match (self.dtype, self.device) {
            (Some(precision), _) => precision,
            (None, DeviceName::Cuda) => Precision::Bf16,
            (None, _) => Precision::F32,
        }
    }

    fn warmup(&self) -> usize {
        if self.quick { 1 } else { 3 }
    }

    fn peer(&self) -> Result<Option<Peer>, BenchError> {
        let Some(python) = &self.peer else { return Ok(None) };
        let cuda = self.device == DeviceName::Cuda;
        Peer::new(python.clone(), self.peer_script.clone(), cuda, self.peer_eager).map(Some)
    }
}
