use std::collections::BTreeMap;
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

use super::forms;
use super::{ByteSize, Choice, EventFolder, ModelSection, OptimSection};
use kiln_checkpoint::Format;
use kiln_model::LoraConfig;

/// The configuration of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// The model to train.
    pub model: ModelSection,
    /// The training data.
    pub data: DataSection,
    /// The length of training, and its batches.
    pub train: TrainSection,
    /// The initial weights.
    pub init: InitSection,
    /// Low-rank adapters, which are trained instead of the weights of `init.from`.
    #[serde(skip_serializing_if = "LoraSection::is_default")]
    pub lora: LoraSection,
    /// The loss that training minimises.
    #[serde(skip_serializing_if = "LossSection::is_default")]
    pub loss: LossSection,
    /// The optimizer and its schedule.
    pub optim: OptimSection,
    /// The sharding of state over ranks.
    pub shard: ShardSection,
    /// The device to compute on.
    pub device: DeviceSection,
    /// The dtypes of computation and reduction.
    pub precision: PrecisionSection,
    /// Communication between ranks.
    pub comm: CommSection,
    /// Validation during and after training.
    pub eval: EvalSection,
    /// Checkpoints.
    pub checkpoint: CheckpointSection,
    /// Logs and reports.
    pub log: LogSection,
    /// Samples generated during the run and at its end.
    pub sample: SampleSection,
    /// Settings of your own program: Kiln keeps them in checkpoints, and does not read them.
    #[serde(skip_serializing_if = "serde_json::Map::is_empty")]
    pub experiment: serde_json::Map<String, serde_json::Value>,
}

section! {
    /// `[data]`: the training data.
    DataSection {
        /// Folder with prepared data (`train.bin`, `val.bin`, `data.json`, `tokenizer.json`).
        path: PathBuf = PathBuf::new(),
        /// Files and folders from which `path` is prepared, if it does not exist yet. An existing `path` must have
        /// been prepared from these files.
        #[serde(deserialize_with = "forms::paths")]
        #[schemars(with = "forms::Paths")]
        text: Vec<PathBuf> = Vec::new(),
        /// Files of conversations from which `path` is prepared, instead of `text`: the assistant's turns count. An
        /// existing `path` must have been prepared from these files.
        #[serde(deserialize_with = "forms::paths", skip_serializing_if = "Vec::is_empty")]
        #[schemars(with = "forms::Paths")]
        chat: Vec<PathBuf> = Vec::new(),
        /// Folder with the tokenizer and the chat template for `chat`; by default that of `init.from`.
        #[serde(skip_serializing_if = "Option::is_none")]
        tokenizer: Option<PathBuf> = None,
        /// A source of samples that the program adds, instead of `text`; `path` then holds its description.
        #[serde(skip_serializing_if = "Option::is_none")]
        source: Option<String> = None,
        /// Settings of a source that the program adds.
        #[serde(skip_serializing_if = "serde_json::Map::is_empty")]
        extra: serde_json::Map<String, serde_json::Value> = serde_json::Map::new(),
        /// Vocabulary size of the tokenizer that is trained when `path` is prepared.
        vocab_size: usize = 4096,
        /// Tokens per sequence.
        seq_len: usize = 256,
        /// Draw samples in a seeded random order, different in every epoch.
        shuffle: bool = true,
        /// Share of the text that is held out for validation when `path` is prepared: whole documents, or the ends
        /// of a few.
        validation_fraction: f64 = 0.05,
        /// Start each document with the beginning-of-text token, when `path` is prepared. `auto` follows the
        /// tokenizer's post-processor.
        #[serde(skip_serializing_if = "is_auto")]
        bos: Choice<bool> = Choice::Auto,
        /// Spelling of the token that ends a document, when `path` is prepared; by default the token that the
        /// tokenizer and the files next to it name.
        #[serde(skip_serializing_if = "Option::is_none")]
        end_of_text: Option<String> = None,
        /// Recognize special tokens in the text, as in chat transcripts, when `path` is prepared.
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        special_tokens: bool = false,
        /// Treatment of unusable lines in `.jsonl` files, and of conversations, when `path` is prepared.
        #[serde(skip_serializing_if = "is_default")]
        bad_lines: BadLines = BadLines::Error,
    }
}

impl DataSection {
    /// Returns the files and folders from which `path` is prepared: text or conversations.
    pub fn inputs(&self) -> &[PathBuf] {
        if self.chat.is_empty() { &self.text } else { &self.chat }
    }
}

fn is_auto<T>(choice: &Choice<T>) -> bool {
    matches!(choice, Choice::Auto)
}

/// Treatment of unusable lines in `.jsonl` files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum BadLines {
    /// The first unusable line ends the preparation.
    #[default]
    Error,
    /// Unusable lines are counted and skipped.
    Skip,
}

/// Treatment of a step whose loss or gradient is NaN or infinite.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum NonFinite {
    /// The run fails; the weights are those of the previous step.
    #[default]
    Abort,
    /// The update is skipped on all ranks: weights and moments stay unchanged, and AdamW's bias correction does
    /// not count it. The step itself counts: the data and the learning rate advance. The run fails after ten
    /// such steps in a row.
    Skip,
}

section! {
    /// `[train]`: the length of training, and its batches.
    TrainSection {
        /// Optimizer steps.
        steps: u64 = 100,
        /// Sequences per optimizer step, over all ranks and micro-batches.
        global_batch: usize = 8,
        /// Sequences per forward pass of one rank; `auto` chooses enough to keep the device busy.
        micro_batch: Choice<usize> = Choice::Is(4),
        /// Seed of initial weights, data order and dropout.
        seed: u64 = 0,
        /// Ranks, as threads of this process; `--ranks` overrides it. If a launcher starts one process per
        /// rank, the number of processes replaces this value.
        ranks: usize = 1,
        /// Names of frozen parameters, which are not trained: patterns such as `layers.*.attention.*`, in which `*`
        /// matches any text and `?` one character, or prefixes such as `layers.0.`.
        freeze: Vec<String> = Vec::new(),
        /// Names of the only parameters that are trained, such as `*.lora_*`: patterns or prefixes, as in `freeze`.
        /// By default, all parameters are trained that are not frozen.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        train_only: Vec<String> = Vec::new(),
        /// Weight of the z-loss, which keeps the logits from drifting (PaLM, Chowdhery et al., 2022), such as
        /// 1e-4; 0 for none. It is added to the training loss only.
        #[serde(skip_serializing_if = "is_default")]
        z_loss: f64 = 0.0,
        /// Treatment of a step whose loss or gradient is NaN or infinite.
        nonfinite: NonFinite = NonFinite::default(),
    }
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// `loss.kind` of the fused cross-entropy.
pub const CROSS_ENTROPY: &str = "cross_entropy";

section! {
    /// `[loss]`: the loss that training minimises. The validation loss is always the cross-entropy.
    LossSection {
        /// `cross_entropy`, or a loss or objective that the program adds.
        kind: String = CROSS_ENTROPY.to_owned(),
        /// Settings of a loss or objective that the program adds.
        #[serde(skip_serializing_if = "serde_json::Map::is_empty")]
        extra: serde_json::Map<String, serde_json::Value> = serde_json::Map::new(),
        /// Models that an objective reads without training them, by the objective's name for them: checkpoints, run
        /// folders, or folders in the Hugging Face layout.
        #[serde(skip_serializing_if = "BTreeMap::is_empty")]
        frozen: BTreeMap<String, PathBuf> = BTreeMap::new(),
    }
}

section! {
    /// `[lora]`: low-rank adapters (Hu et al., 2021) of linear maps in the blocks, which are trained instead of the
    /// weights of `init.from`.
    LoraSection {
        /// Rank of the adapters; 0 for none.
        rank: usize = 0,
        /// The result of an adapter is multiplied by `alpha / rank`.
        alpha: f64 = LoraConfig::default().alpha,
        /// Probability of dropping an element of an adapter's input.
        dropout: f64 = LoraConfig::default().dropout,
        /// Maps with an adapter: names, such as `q_proj`, or patterns for full names, such as `layers.0.attention.*`.
        targets: Vec<String> = LoraConfig::default().targets,
    }
}

impl LoraSection {
    pub(super) fn is_default(&self) -> bool {
        *self == LoraSection::default()
    }

    /// Returns the adapters, if there are any.
    pub fn adapters(&self) -> Option<LoraConfig> {
        let LoraSection { rank, alpha, dropout, ref targets } = *self;
        (rank > 0).then(|| LoraConfig { rank, alpha, dropout, targets: targets.clone() })
    }
}

impl LossSection {
    fn is_default(&self) -> bool {
        *self == LossSection::default()
    }
}

/// `[init]`: the initial weights.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct InitSection {
    /// Checkpoint folder to take the weights from; empty for random weights.
    pub from: PathBuf,
}

/// `[shard]`: the sharding of state over ranks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ShardSection {
    /// Strategy for sharding state over ranks.
    pub strategy: Strategy,
    /// Number of ranks that share one copy of the model; for the hybrid strategies.
    pub shard_size: Option<usize>,
    /// The modules whose gathered weights are freed after the forward pass.
    pub reshard: Reshard,
    /// The parts of the forward pass that are recomputed in backward; with `auto`, the least with which the run is
    /// planned to fit into memory.
    pub recompute: Choice<Recompute>,
    /// The form in which gradients of micro-batches accumulate: as shards, with a reduction in every
    /// micro-batch, or as whole gradients on every rank, with one reduction per step. The default is `sharded`,
    /// and `unsharded` under `NO_SHARD`. A resumed run keeps its value.
    pub accumulate: Option<Accumulate>,
    /// Keep master weights and moments in host memory and update them there, while a GPU computes the rest:
    /// slower, for models whose state does not fit on the GPU. No effect on the CPU.
    pub offload: bool,
    /// Gather and reduce through the communicator even with a single rank; for profiling. No effect with more
    /// ranks, or if the strategy shards nothing.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub communicate_alone: bool,
}

impl ShardSection {
    /// Returns the form of gradient accumulation: the value that is set, or the strategy's default.
    pub fn accumulate(&self) -> Accumulate {
        self.accumulate.unwrap_or_else(|| Accumulate::from_strategy(self.strategy))
    }

    /// Returns the recomputed parts; none if that is not settled yet.
    pub fn recompute(&self) -> Recompute {
        self.recompute.given().unwrap_or_default()
    }
}

/// Device that holds the tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Backend {
    /// A GPU if this build can use one on this machine, else the CPU; logs the choice and the reason.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// NVIDIA GPUs, in builds with feature `cuda`: GPU 0 if ranks are threads, one GPU each if they are
    /// processes.
    Cuda,
    /// Any adapter that wgpu finds, in builds with feature `wgpu`, without bf16 and with ranks that are
    /// threads: for tests, on any Vulkan driver, and for GPUs of other vendors. `auto` never selects it.
    Wgpu,
}

section! {
    /// `[device]`: the device to compute on.
    DeviceSection {
        /// Device that holds the tensors.
        backend: Backend = Backend::Auto,
        /// Total number of compute threads of the ranks on one machine, if they compute on the CPU; by default,
        /// the number of cores that are available to a process.
        threads: Option<usize> = None,
        /// Memory that the run must fit into, on the machine and on its GPU; by default, what each of the two reports.
        memory: Option<ByteSize> = None,
        /// Share of the memory that the run may use, above 0 and up to 1; by default, all of it.
        #[serde(skip_serializing_if = "Option::is_none")]
        memory_fraction: Option<f64> = None,
        /// Peak TFLOP/s of all devices of the run, against which `mfu` is measured. The default for GPUs comes
        /// from NVIDIA's data sheet. For a CPU, the first runs on a machine measure the peak with a matrix
        /// product, until two measurements agree; until then, there is no `mfu`.
        peak_tflops: Option<f64> = None,
        /// Compare fused kernels with plain operations on a GPU that is new to this build, or has a new driver.
        /// An operation whose kernel is wrong is computed with plain operations.
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
    /// IEEE 754 16-bit floats, with an adaptive loss scale; for GPUs without bfloat16.
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
    /// `[precision]`: the dtypes of computation and reduction. Master weights, moments and gradient
    /// accumulation are always f32.
    PrecisionSection {
        /// Dtype of gathered weights and of computation; `auto` is bf16 on GPUs that support it and f16 on
        /// other NVIDIA GPUs, bf16 on CPUs with AMX and f32 on other CPUs.
        compute: Choice<Precision> = Choice::Is(Precision::F32),
        /// Dtype in which gradients are summed over ranks.
        reduce: Precision = Precision::F32,
    }
}

/// Transport between ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum CommBackend {
    /// `local` for ranks that are threads; for ranks that are processes `tcp`, or NCCL on GPUs.
    #[default]
    Auto,
    /// Ranks are threads of this process.
    Local,
    /// Every rank is a process started by a launcher.
    Tcp,
    /// Every rank is a process started by `mpirun`; in builds with feature `mpi`.
    Mpi,
}

section! {
    /// `[comm]`: communication between ranks.
    CommSection {
        /// Transport between ranks.
        backend: CommBackend = CommBackend::Auto,
        /// Seconds to wait for the other ranks in one collective.
        timeout_s: f64 = 600.0,
        /// Seconds to wait at the start until all processes have joined.
        join_timeout_s: f64 = 300.0,
        /// Ports on which processes listen for each other, as in `"29600-29700"`; by default any port that the
        /// system assigns. Rank 0 also listens on `MASTER_PORT`. NCCL and MPI choose their own ports.
        ports: Option<Ports> = None,
        /// Let processes join from beyond the loopback address without `KILN_JOB_SECRET`: then anyone who
        /// reaches the port can take a rank's place. For networks that only trusted machines can reach.
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        open: bool = false,
        /// Protection of the TCP traffic between processes after the handshake: `off` or `encrypt`. Needs
        /// `KILN_JOB_SECRET`. It covers neither the traffic of NCCL and MPI nor shared memory between ranks on
        /// one machine.
        #[serde(skip_serializing_if = "Seal::is_off")]
        seal: Seal = Seal::Off,
    }
}

impl CommSection {
    /// Returns how long to wait for the other ranks in one collective.
    pub fn timeout(&self) -> Duration {
        Duration::try_from_secs_f64(self.timeout_s).unwrap_or(Duration::MAX)
    }

    /// Returns how long to wait until all processes have joined.
    pub fn join_timeout(&self) -> Duration {
        Duration::try_from_secs_f64(self.join_timeout_s).unwrap_or(Duration::MAX)
    }
}

section! {
    /// `[eval]`: validation during and after training.
    EvalSection {
        /// Steps between evaluations; 0 for a single one at the end.
        every: u64 = 0,
        /// Validation sequences per evaluation; 0 for all.
        samples: u64 = 64,
        /// File of prompts with answers, one object with `prompt` and `answer` per line, as `kiln eval --pairs`
        /// reads it: every evaluation also reports the loss of the answers.
        #[serde(skip_serializing_if = "is_default")]
        prompts: Option<PathBuf> = None,
    }
}

/// Reaction of a run to a checkpoint that cannot be written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnFailure {
    /// The run ends with an error.
    #[default]
    Abort,
    /// The run reports the failure and continues with its existing checkpoints; only its last save must
    /// succeed.
    Continue,
}

section! {
    /// `[checkpoint]`: when and how checkpoints are saved.
    CheckpointSection {
        /// Steps between checkpoints; 0 for a single one at the end.
        every: u64 = 0,
        /// Number of newest checkpoints to keep; 0 for all.
        keep: usize = 2,
        /// Also keep checkpoints whose step is a multiple of this; 0 for none.
        keep_every: u64 = 0,
        /// `sharded`: every rank writes its part; `full`: rank 0 writes whole arrays.
        format: Format = Format::default(),
        /// Write sharded checkpoints while training continues.
        #[serde(rename = "async")]
        background: bool = true,
        /// Reaction to a checkpoint that cannot be written.
        on_failure: OnFailure = OnFailure::default(),
        /// Seconds without progress after which a save fails: the disk accepts no data, or parts that other ranks
        /// have written do not become visible.
        timeout_s: f64 = 600.0,
    }
}

impl CheckpointSection {
    /// Returns how long a save may make no progress.
    pub fn timeout(&self) -> Duration {
        Duration::try_from_secs_f64(self.timeout_s).unwrap_or(Duration::MAX)
    }
}

section! {
    /// `[log]`: logs and reports.
    LogSection {
        /// Steps between lines in `metrics.jsonl` and on the console.
        every: u64 = 10,
        /// Add the root mean square of the activations after every block to `metrics.jsonl`.
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        activations: bool = false,
        /// Add the gradient norm of every block to `metrics.jsonl`. In logged steps, the host then waits for
        /// the GPU.
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        gradients: bool = false,
        /// TensorBoard files: `true` for `tensorboard` in the run folder, or a folder, in which each run has a
        /// subfolder named after it.
        #[serde(skip_serializing_if = "EventFolder::is_none")]
        tensorboard: EventFolder = EventFolder::None,
        /// Steps between histograms of every block's weights and gradients, for TensorBoard; 0 for none. In
        /// such steps, the host waits for the GPU.
        #[serde(skip_serializing_if = "is_no_step")]
        histograms: u64 = 0,
        /// Port, or address and port as in `"127.0.0.1:6006"`, at which rank 0 serves a page of the run for browsers,
        /// and `/metrics` for Prometheus. If other machines can reach the address, it requires a token:
        /// `KILN_HTTP_TOKEN`, or a generated one, which is printed.
        #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "forms::address")]
        #[schemars(with = "Option<forms::Address>")]
        http: Option<SocketAddr> = None,
    }
}

fn is_no_step(every: &u64) -> bool {
    *every == 0
}

impl LogSection {
    /// Returns whether `step` of a run of `steps` steps is logged.
    pub fn is_logged(&self, step: u64, steps: u64) -> bool {
        step == steps || step.is_multiple_of(self.every) || step == 1
    }

    /// Returns whether histograms of `step` are written.
    pub fn has_histograms(&self, step: u64) -> bool {
        self.histograms > 0 && step.is_multiple_of(self.histograms)
    }
}

section! {
    /// `[sample]`: samples generated during the run and at its end.
    SampleSection {
        /// Prompt of the first sample; empty for no such sample.
        prompt: String = String::new(),
        /// Prompts of further samples, one each; with an empty prompt, the sample starts like a new document.
        #[serde(skip_serializing_if = "is_default")]
        prompts: Vec<String> = Vec::new(),
        /// Steps between samples; 0 for samples only at the end.
        #[serde(skip_serializing_if = "is_default")]
        every: u64 = 0,
        /// Tokens to generate.
        max_tokens: usize = 64,
        /// Temperature; 0 always takes the most likely token.
        temperature: f64 = 0.8,
    }
}

impl SampleSection {
    /// Returns the prompts of all samples, in order.
    pub fn all_prompts(&self) -> impl Iterator<Item = &str> {
        let first = Some(&self.prompt).filter(|prompt| !prompt.is_empty());
        first.into_iter().chain(&self.prompts).map(String::as_str)
    }
}
