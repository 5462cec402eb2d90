//! Sections and keys of a configuration file.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use burn::tensor::FloatDType;
use kiln_collectives::DType;
use kiln_collectives::tcp::{Ports, Seal};
use kiln_shard::{Accumulate, Recompute, Reshard, Strategy};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ByteSize, Choice, EventFolder, ModelSection, OptimSection};
use crate::checkpoint::Format;

/// Everything a run can be told.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
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
    /// What training minimises.
    #[serde(skip_serializing_if = "LossSection::is_default")]
    pub loss: LossSection,
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
    /// Texts generated at the end of the run, and on the way.
    pub sample: SampleSection,
    /// Whatever a program wants to be told: Kiln keeps it in checkpoints, and reads nothing in it.
    #[serde(skip_serializing_if = "serde_json::Map::is_empty")]
    pub experiment: serde_json::Map<String, serde_json::Value>,
}

section! {
    /// `[data]`.
    DataSection {
        /// Folder with prepared data (`train.bin`, `val.bin`, `data.json`, `tokenizer.json`).
        path: PathBuf = PathBuf::new(),
        /// Files and folders to prepare `path` from, when it does not exist yet. If it does, it must have
        /// been prepared from them.
        text: Vec<PathBuf> = Vec::new(),
        /// Size of the tokenizer that is trained when `path` is prepared.
        vocab_size: usize = 4096,
        /// Tokens per sequence.
        seq_len: usize = 256,
        /// Whether samples come in a seeded random order, anew in every epoch.
        shuffle: bool = true,
        /// Share of the text that is held out when `path` is prepared: whole documents, or the ends of a few.
        validation_fraction: f64 = 0.05,
        /// Whether documents start with the token that starts a text, when `path` is prepared. `auto`: as the
        /// tokenizer's post-processor says.
        #[serde(skip_serializing_if = "is_auto")]
        bos: Choice<bool> = Choice::Auto,
        /// Spelling of the token that ends a document, when `path` is prepared; if left out, the one that the
        /// tokenizer and the files beside it name.
        #[serde(skip_serializing_if = "Option::is_none")]
        end_of_text: Option<String> = None,
        /// Whether spellings of special tokens in the text become these tokens, when `path` is prepared: for chats.
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        special_tokens: bool = false,
        /// What happens to lines of `.jsonl` files that cannot be used, when `path` is prepared.
        #[serde(skip_serializing_if = "is_default")]
        bad_lines: BadLines = BadLines::Error,
    }
}

fn is_auto<T>(choice: &Choice<T>) -> bool {
    matches!(choice, Choice::Auto)
}

/// What happens to lines of `.jsonl` files that cannot be used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum BadLines {
    /// The first one ends the preparation.
    #[default]
    Error,
    /// They are counted and left out.
    Skip,
}

/// What happens to a step whose loss or gradient is NaN or infinite.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum NonFinite {
    /// The run fails; the weights are those of the step before.
    #[default]
    Abort,
    /// The update is left out on all ranks: weights and moments stay as they are, and AdamW's bias
    /// correction does not count it. The step itself counts: the data and the learning rate go on.
    /// The run fails when ten steps in a row come to that.
    Skip,
}

section! {
    /// `[train]`.
    TrainSection {
        /// Optimizer steps.
        steps: u64 = 100,
        /// Sequences per optimizer step, over all ranks and micro-batches.
        global_batch: usize = 8,
        /// Sequences per forward pass of one rank; `auto` for as many as the device is busy with.
        micro_batch: Choice<usize> = Choice::Is(4),
        /// Seed of initial weights, data order and dropout.
        seed: u64 = 0,
        /// Ranks, as threads of this process; `--ranks` overrides it. Where a launcher starts a process
        /// per rank, their number is what counts, and it is what ends up here.
        ranks: usize = 1,
        /// Parameters whose names start with one of these are not trained, as in `layers.0.`.
        freeze: Vec<String> = Vec::new(),
        /// Weight of the z-loss, which keeps the logits from drifting (PaLM, Chowdhery et al., 2022), such as
        /// 1e-4; 0 for none. Part of the training loss alone.
        #[serde(skip_serializing_if = "is_default")]
        z_loss: f64 = 0.0,
        /// What happens when a loss or a gradient is not a number.
        nonfinite: NonFinite = NonFinite::default(),
    }
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// `loss.kind` of the fused cross-entropy.
pub const CROSS_ENTROPY: &str = "cross_entropy";

section! {
    /// `[loss]`: what training minimises. The validation loss is the cross-entropy whatever it is.
    LossSection {
        /// `cross_entropy`, or a loss that the program adds.
        kind: String = CROSS_ENTROPY.to_owned(),
        /// Settings of a loss that the program adds.
        #[serde(skip_serializing_if = "serde_json::Map::is_empty")]
        extra: serde_json::Map<String, serde_json::Value> = serde_json::Map::new(),
    }
}

impl LossSection {
    fn is_default(&self) -> bool {
        *self == LossSection::default()
    }
}

/// `[init]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct InitSection {
    /// Checkpoint folder to take the weights from; empty for random weights.
    pub from: PathBuf,
}

/// `[shard]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ShardSection {
    /// How state is spread over ranks.
    pub strategy: Strategy,
    /// Ranks that share one copy of the model; for the hybrid strategies.
    pub shard_size: Option<usize>,
    /// When gathered weights are freed after forward.
    pub reshard: Reshard,
    /// What runs again in backward.
    pub recompute: Recompute,
    /// The form in which gradients of micro-batches add up: as shards, with a reduction in every micro-batch, or as
    /// whole gradients on every rank, with one reduction per step. The default is `sharded`, and `unsharded` under
    /// `NO_SHARD`. A resumed run keeps its value.
    pub accumulate: Option<Accumulate>,
    /// Whether master weights and moments are in the memory of the host although a GPU computes, and are
    /// updated there: slower, for models whose state does not fit. Without effect on the CPU.
    pub offload: bool,
    /// Whether a single rank gathers and reduces all the same, through its communicator: for profiling.
    /// Without effect on more ranks, and where the strategy shards nothing.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub communicate_alone: bool,
}

impl ShardSection {
    /// Returns the form in which gradients of micro-batches add up: the value that is set, or the strategy's default.
    pub fn accumulate(&self) -> Accumulate {
        self.accumulate.unwrap_or_else(|| Accumulate::of_strategy(self.strategy))
    }
}

/// Where tensors live.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Backend {
    /// A GPU if this build and this machine have one that can be used, else the CPU; says which, and why.
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

section! {
    /// `[device]`.
    DeviceSection {
        /// Where tensors live.
        backend: Backend = Backend::Auto,
        /// Compute threads of all ranks of one machine together, where they compute on the CPU; its cores
        /// if left out.
        threads: Option<usize> = None,
        /// Memory that a run must fit into, on the machine and on its GPU; what they say if left out.
        memory: Option<ByteSize> = None,
        /// Share of that memory that the run may take, above 0 and up to 1; all of it if left out.
        #[serde(skip_serializing_if = "Option::is_none")]
        memory_fraction: Option<f64> = None,
        /// Peak of all devices of the run in TFLOP/s that `mfu` is measured against. By default for GPUs that of NVIDIA's
        /// data sheet. That of a CPU is measured with a matrix product by the first starts on a machine, until two
        /// measurements agree; there is no `mfu` before.
        peak_tflops: Option<f64> = None,
        /// Whether fused kernels are held against plain operations on a GPU that this build has not seen
        /// with its driver. An operation whose kernel is wrong is computed in plain operations.
        #[serde(skip_serializing_if = "Clone::clone")]
        verify_kernels: bool = true,
    }
}

/// A floating-point dtype.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
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
        DType::from(*self).fmt(f)
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

impl From<Precision> for FloatDType {
    fn from(precision: Precision) -> Self {
        match precision {
            Precision::F32 => FloatDType::F32,
            Precision::Bf16 => FloatDType::BF16,
            Precision::F16 => FloatDType::F16,
        }
    }
}

section! {
    /// `[precision]`. Master weights, moments and gradient accumulation are always f32.
    PrecisionSection {
        /// Dtype of gathered weights and of computation; `auto` is bf16 on GPUs that have it and f16 on other
        /// NVIDIA GPUs, bf16 on CPUs with AMX and f32 on others.
        compute: Choice<Precision> = Choice::Is(Precision::F32),
        /// Dtype in which gradients are summed over ranks.
        reduce: Precision = Precision::F32,
    }
}

/// How ranks talk to each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum CommBackend {
    /// `local` for ranks that are threads; for ranks that are processes `tcp`, or NCCL on GPUs.
    #[default]
    Auto,
    /// Ranks are threads of this process.
    Local,
    /// Every rank is a process that a launcher has started.
    Tcp,
    /// Every rank is a process that `mpirun` has started; in builds with feature `mpi`.
    Mpi,
}

section! {
    /// `[comm]`.
    CommSection {
        /// How ranks talk to each other.
        backend: CommBackend = CommBackend::Auto,
        /// Seconds to wait for the other ranks in one collective.
        timeout_s: f64 = 600.0,
        /// Seconds to wait at the start until all processes are there.
        join_timeout_s: f64 = 300.0,
        /// Ports on which processes listen for each other, as in `"29600-29700"`; any that the system gives
        /// if there is none here. Rank 0 listens on `MASTER_PORT` besides. NCCL and MPI choose ports of their
        /// own.
        ports: Option<Ports> = None,
        /// Whether processes may meet off the loopback address without `KILN_JOB_SECRET`: then whoever
        /// reaches the port can take a rank's place. For networks that only trusted machines reach.
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        open: bool = false,
        /// Protection of the traffic between processes over TCP after the handshake: `off` or `encrypt`.
        /// Needs `KILN_JOB_SECRET`. NCCL's and MPI's traffic is not covered, nor what ranks on one machine
        /// read from each other's memory.
        #[serde(skip_serializing_if = "Seal::is_off")]
        seal: Seal = Seal::Off,
    }
}

impl CommSection {
    /// How long to wait for the other ranks in one collective.
    pub fn timeout(&self) -> Duration {
        Duration::try_from_secs_f64(self.timeout_s).unwrap_or(Duration::MAX)
    }

    /// How long to wait until all processes are there.
    pub fn join_timeout(&self) -> Duration {
        Duration::try_from_secs_f64(self.join_timeout_s).unwrap_or(Duration::MAX)
    }
}

section! {
    /// `[eval]`.
    EvalSection {
        /// Steps between evaluations; 0 for one at the end only.
        every: u64 = 0,
        /// Validation sequences per evaluation; 0 for all.
        samples: u64 = 64,
        /// File of prompts with answers, an object with `prompt` and `answer` per line, as
        /// `kiln eval --pairs` reads it: every evaluation tells the loss of the answers as well.
        #[serde(skip_serializing_if = "is_default")]
        prompts: Option<PathBuf> = None,
    }
}

/// What a run does when a checkpoint cannot be written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnFailure {
    /// It ends with an error.
    #[default]
    Abort,
    /// It says so and goes on, with the checkpoints it has; only the last save of a run must succeed.
    Continue,
}

section! {
    /// `[checkpoint]`.
    CheckpointSection {
        /// Steps between checkpoints; 0 for one at the end only.
        every: u64 = 0,
        /// How many of the newest checkpoints to keep; 0 for all.
        keep: usize = 2,
        /// Keep those whose step is a multiple of this, besides; 0 for none.
        keep_every: u64 = 0,
        /// `sharded`: every rank writes its part; `full`: rank 0 writes whole arrays.
        format: Format = Format::default(),
        /// Whether sharded checkpoints are written while training goes on.
        #[serde(rename = "async")]
        background: bool = true,
        /// What to do when one cannot be written.
        on_failure: OnFailure = OnFailure::default(),
        /// Seconds that a save may go without getting on before it has failed: the parts of all ranks are
        /// written and cannot be seen, or the disk takes nothing.
        timeout_s: f64 = 600.0,
    }
}

impl CheckpointSection {
    /// How long a save may go without getting on.
    pub fn timeout(&self) -> Duration {
        Duration::try_from_secs_f64(self.timeout_s).unwrap_or(Duration::MAX)
    }
}

section! {
    /// `[log]`.
    LogSection {
        /// Steps between lines in `metrics.jsonl` and on the console.
        every: u64 = 10,
        /// Whether `metrics.jsonl` gets the root mean square of the activations behind every block.
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        activations: bool = false,
        /// Whether `metrics.jsonl` gets the norm of the gradient of every block. A GPU is waited for in steps
        /// that are logged.
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        gradients: bool = false,
        /// Whether there are files for TensorBoard: `true` for `tensorboard` in the run folder, or a folder, in
        /// which each run has one of its own name.
        #[serde(skip_serializing_if = "EventFolder::is_none")]
        tensorboard: EventFolder = EventFolder::None,
        /// Steps between histograms of the weights and gradients of every block, which TensorBoard shows; 0 for
        /// none. A GPU is waited for in such steps.
        #[serde(skip_serializing_if = "is_no_step")]
        histograms: u64 = 0,
        /// Address and port, as in `"127.0.0.1:6006"`, at which rank 0 serves a page of the run for browsers, and
        /// `/metrics` for Prometheus. One that other machines reach has a token: `KILN_HTTP_TOKEN`, or one that is
        /// told.
        #[serde(skip_serializing_if = "Option::is_none")]
        http: Option<SocketAddr> = None,
    }
}

fn is_no_step(every: &u64) -> bool {
    *every == 0
}

impl LogSection {
    /// Whether `step` of a run of `steps` is logged.
    pub fn is_logged(&self, step: u64, steps: u64) -> bool {
        step == steps || step.is_multiple_of(self.every) || step == 1
    }

    /// Whether there are histograms of `step`.
    pub fn has_histograms(&self, step: u64) -> bool {
        self.histograms > 0 && step.is_multiple_of(self.histograms)
    }
}

section! {
    /// `[sample]`: texts generated when the run ends, and on the way.
    SampleSection {
        /// What the text starts with; empty for none at all.
        prompt: String = String::new(),
        /// What further texts start with, one text each; a text with an empty prompt starts as a document
        /// does.
        #[serde(skip_serializing_if = "is_default")]
        prompts: Vec<String> = Vec::new(),
        /// Steps between texts; 0 for texts at the end only.
        #[serde(skip_serializing_if = "is_default")]
        every: u64 = 0,
        /// Tokens to generate.
        max_tokens: usize = 64,
        /// Temperature; 0 takes the likeliest token.
        temperature: f64 = 0.8,
    }
}

impl SampleSection {
    /// The prompts of all texts, in order.
    pub fn all_prompts(&self) -> impl Iterator<Item = &str> {
        let first = Some(&self.prompt).filter(|prompt| !prompt.is_empty());
        first.into_iter().chain(&self.prompts).map(String::as_str)
    }
}
