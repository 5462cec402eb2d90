//! Sections and keys of a configuration file.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use kiln_collectives::DType;
use kiln_shard::{AdamW, Recompute, Reshard, Strategy};
use serde::{Deserialize, Serialize};

use super::{ByteSize, Choice, CommSection, ModelSection};
use crate::checkpoint::Format;

/// Everything a run can be told.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// What is trained.
    pub model: ModelSection,
    /// What it is trained on.
    pub data: DataSection,
    /// How long, in which batches.
    pub train: TrainSection,
    /// Where the weights start.
    pub init: InitSection,
    /// The optimizer and its schedule.
    pub optim: OptimSection,
    /// How state is spread over ranks.
    pub shard: ShardSection,
    /// Where it runs.
    pub device: DeviceSection,
    /// In which dtypes.
    pub precision: PrecisionSection,
    /// Communication.
    pub comm: CommSection,
    /// Validation.
    pub eval: EvalSection,
    /// Saving.
    pub checkpoint: CheckpointSection,
    /// Reporting.
    pub log: LogSection,
    /// Text generated at the end of the run.
    pub sample: SampleSection,
}

/// `[data]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DataSection {
    /// Folder with prepared data (`train.bin`, `val.bin`, `data.json`, `tokenizer.json`).
    pub path: PathBuf,
    /// Files and folders to prepare `path` from, when it does not exist yet. If it does, it must have been
    /// prepared from them.
    pub text: Vec<PathBuf>,
    /// Size of the tokenizer that is trained when `path` is prepared.
    pub vocab_size: usize,
    /// Tokens per sequence.
    pub seq_len: usize,
    /// Whether samples come in a seeded random order, anew in every epoch.
    pub shuffle: bool,
    /// Share of the text that is held out when `path` is prepared.
    pub validation_fraction: f64,
}

impl Default for DataSection {
    fn default() -> Self {
        DataSection {
            path: PathBuf::new(),
            text: Vec::new(),
            vocab_size: 4096,
            seq_len: 256,
            shuffle: true,
            validation_fraction: 0.05,
        }
    }
}

/// What happens to a step whose loss or gradient is NaN or infinite.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NonFinite {
    /// The run fails; the weights are those of the step before.
    #[default]
    Abort,
    /// The update is left out on all ranks: weights and moments stay as they are, and AdamW's bias
    /// correction does not count it. The step itself counts: the data and the learning rate go on.
    /// The run fails when [`MAX_SKIPPED`](crate::run::MAX_SKIPPED) steps in a row come to that.
    Skip,
}

/// `[train]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TrainSection {
    /// Optimizer steps.
    pub steps: u64,
    /// Sequences per optimizer step, over all ranks and micro-batches.
    pub global_batch: usize,
    /// Sequences per forward pass of one rank; `auto` for as many as the device is busy with.
    pub micro_batch: Choice<usize>,
    /// Seed of initial weights, data order and dropout.
    pub seed: u64,
    /// Ranks, as threads of this process; `--ranks` overrides it. Where a launcher starts a process
    /// per rank, their number is what counts, and it is what ends up here.
    pub ranks: usize,
    /// Parameters whose names start with one of these are not trained, as in `layers.0.`.
    pub freeze: Vec<String>,
    /// What happens when a loss or a gradient is not a number.
    pub nonfinite: NonFinite,
}

impl Default for TrainSection {
    fn default() -> Self {
        TrainSection {
            steps: 100,
            global_batch: 8,
            micro_batch: Choice::Is(4),
            seed: 0,
            ranks: 1,
            freeze: Vec::new(),
            nonfinite: NonFinite::default(),
        }
    }
}

/// `[init]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct InitSection {
    /// Checkpoint folder to take the weights from; empty for random weights.
    pub from: PathBuf,
}

/// Learning-rate schedules; all start with a linear warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Schedule {
    /// `lr` to the end.
    Constant,
    /// Half a cosine from `lr` to `lr * min_lr_ratio` (Loshchilov and Hutter, 2017).
    #[default]
    Cosine,
    /// Warm-up, stable, decay: `lr` until the last `decay_steps`, then linearly to
    /// `lr * min_lr_ratio` (Hu et al., 2024).
    Wsd,
}

/// `[optim]`: AdamW.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OptimSection {
    /// Peak learning rate.
    pub lr: f64,
    /// How the learning rate moves.
    pub schedule: Schedule,
    /// Steps of linear warm-up.
    pub warmup_steps: u64,
    /// Steps of the final decay of `wsd`; a tenth of the run if left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decay_steps: Option<u64>,
    /// Final learning rate over `lr`.
    pub min_lr_ratio: f64,
    /// Decoupled weight decay of matrices and embeddings.
    pub weight_decay: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Largest norm of the gradient; 0 for no clipping.
    pub grad_clip: f64,
}

impl Default for OptimSection {
    fn default() -> Self {
        OptimSection {
            lr: 1e-3,
            schedule: Schedule::default(),
            warmup_steps: 10,
            decay_steps: None,
            min_lr_ratio: 0.1,
            weight_decay: 0.1,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            grad_clip: 1.0,
        }
    }
}

impl OptimSection {
    /// The optimizer's settings.
    pub fn adamw(&self) -> AdamW {
        AdamW { beta1: self.beta1, beta2: self.beta2, epsilon: self.eps, weight_decay: self.weight_decay }
    }
}

/// `[shard]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ShardSection {
    /// How state is spread over ranks.
    pub strategy: Strategy,
    /// Ranks that share one copy of the model; for the hybrid strategies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shard_size: Option<usize>,
    /// When gathered weights are freed after forward.
    pub reshard: Reshard,
    /// What runs again in backward.
    pub recompute: Recompute,
    /// Whether master weights and moments are in the memory of the host although a GPU computes, and are
    /// updated there: slower, for models whose state does not fit. Without effect on the CPU.
    pub offload: bool,
    /// Whether a single rank gathers and reduces all the same, through its communicator: for profiling.
    /// Without effect on more ranks, and where the strategy shards nothing.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub communicate_alone: bool,
}

/// Where tensors live.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Backend {
    /// A GPU if this build and this machine have one that can be used, else the CPU; says which, and
    /// why.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// NVIDIA GPUs, in builds with feature `cuda`: GPU 0 if ranks are threads, one each if they are
    /// processes.
    Cuda,
    /// Whatever wgpu finds, in builds with feature `wgpu`, without bf16 and with ranks that are threads: for
    /// tests, which any driver of Vulkan will do for, and for GPUs of other makers. `auto` never takes it.
    Wgpu,
}

/// `[device]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DeviceSection {
    /// Where tensors live.
    pub backend: Backend,
    /// Compute threads of all ranks of one machine together, where they compute on the CPU; its cores
    /// if left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
    /// Memory that a run must fit into, on the machine and on its GPU; what they say if left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<ByteSize>,
    /// Peak of all devices of the run in TFLOP/s that `mfu` is measured against. If left out: for
    /// GPUs that of NVIDIA's data sheet, for CPUs measured with a matrix product at start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_tflops: Option<f64>,
}

/// A floating-point dtype.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// 32 bits.
    #[default]
    F32,
    /// bfloat16.
    Bf16,
    /// 16 bits as of IEEE 754, with a loss scale that adapts; for GPUs that have no bfloat16.
    F16,
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Precision::F32 => "f32",
            Precision::Bf16 => "bf16",
            Precision::F16 => "f16",
        })
    }
}

impl From<Precision> for DType {
    fn from(precision: Precision) -> Self {
        match precision {
            Precision::F32 => DType::F32,
            Precision::Bf16 => DType::BF16,
            Precision::F16 => DType::F16,
        }
    }
}

/// `[precision]`. Master weights, moments and gradient accumulation are always f32.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PrecisionSection {
    /// Dtype of gathered weights and of computation; `auto` is bf16 on GPUs that have it, and else f32.
    pub compute: Choice<Precision>,
    /// Dtype in which gradients are summed over ranks.
    pub reduce: Precision,
}

impl Default for PrecisionSection {
    fn default() -> Self {
        PrecisionSection { compute: Choice::Is(Precision::F32), reduce: Precision::F32 }
    }
}

/// `[eval]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EvalSection {
    /// Steps between evaluations; 0 for one at the end only.
    pub every: u64,
    /// Validation sequences per evaluation; 0 for all.
    pub samples: u64,
}

impl Default for EvalSection {
    fn default() -> Self {
        EvalSection { every: 0, samples: 64 }
    }
}

/// What a run does when a checkpoint cannot be written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnFailure {
    /// It ends with an error.
    #[default]
    Abort,
    /// It says so and goes on, with the checkpoints it has; only the last save of a run must succeed.
    Continue,
}

/// `[checkpoint]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointSection {
    /// Steps between checkpoints; 0 for one at the end only.
    pub every: u64,
    /// How many of the newest checkpoints to keep; 0 for all.
    pub keep: usize,
    /// Keep those whose step is a multiple of this, besides; 0 for none.
    pub keep_every: u64,
    /// `sharded`: every rank writes its part; `full`: rank 0 writes whole arrays.
    pub format: Format,
    /// Whether sharded checkpoints are written while training goes on.
    #[serde(rename = "async")]
    pub background: bool,
    /// What to do when one cannot be written.
    pub on_failure: OnFailure,
    /// Seconds that a save may go without getting on before it has failed: the parts of all ranks are
    /// written and cannot be seen, or the disk takes nothing.
    pub timeout_s: f64,
}

impl CheckpointSection {
    /// How long a save may go without getting on.
    pub fn timeout(&self) -> Duration {
        Duration::try_from_secs_f64(self.timeout_s).unwrap_or(Duration::MAX)
    }
}

impl Default for CheckpointSection {
    fn default() -> Self {
        CheckpointSection {
            every: 0,
            keep: 2,
            keep_every: 0,
            format: Format::default(),
            background: true,
            on_failure: OnFailure::default(),
            timeout_s: 600.0,
        }
    }
}

/// `[log]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LogSection {
    /// Steps between lines in `metrics.jsonl` and on the console.
    pub every: u64,
}

impl Default for LogSection {
    fn default() -> Self {
        LogSection { every: 10 }
    }
}

/// `[sample]`: text generated when the run ends.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SampleSection {
    /// What the text starts with; empty for none at all.
    pub prompt: String,
    /// Tokens to generate.
    pub max_tokens: usize,
    /// Temperature; 0 takes the likeliest token.
    pub temperature: f64,
}

impl Default for SampleSection {
    fn default() -> Self {
        SampleSection { prompt: String::new(), max_tokens: 64, temperature: 0.8 }
    }
}
