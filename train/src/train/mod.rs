//! Training runs.
//!
//! [`run`] prepares what all ranks share and starts them; the step that each rank takes is
//! `train_step` in `rank.rs` and reads downwards: fetch → forward → loss ÷ global tokens →
//! backward → clip → finite? → step → log.

mod evaluate;
mod rank;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use burn::tensor::Device;
use kiln_model::decoder::Decoder;
use kiln_model::layers::{Block, Layer};
use kiln_model::{Key, ModelConfig};
use kiln_shard::ranks::{RankError, RanksError, run_ranks};
use kiln_shard::{Policy, ShardError};

use crate::checkpoint::{self, Checkpoint, CheckpointError};
use crate::config::{Config, ConfigError, ModelSection};
use crate::data::{self, DataError, DataInfo, Split, TokenFile, Tokenizer};
use crate::launch::{LaunchArgsError, LaunchError};
use crate::metrics::{say, write_beside};
use crate::place::{Place, PlaceError};
use crate::sharded::parameter_names;
use crate::{device, prepared};

pub use evaluate::evaluate;

/// How a run is started, besides its configuration.
#[derive(Clone, Debug, Default)]
pub struct RunOptions {
    /// Run folder.
    pub out: PathBuf,
    /// Where to go on from.
    pub resume: Option<Resume>,
    /// The place of this process, if it is one rank of several.
    pub place: Option<Place>,
}

/// Where a run goes on from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resume {
    /// The newest checkpoint in the run folder.
    Latest,
    /// A checkpoint folder.
    Path(PathBuf),
}

/// What a run has come to.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// Optimizer steps done in total.
    pub steps: u64,
    /// Loss of the last step; `None` if there was nothing left to do.
    pub loss: Option<f64>,
    /// Validation loss at the end.
    pub val_loss: f64,
    /// The last checkpoint.
    pub checkpoint: PathBuf,
    /// Generated text, if a prompt was given.
    pub sample: Option<String>,
}

/// Why a run failed.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The data.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The sharding engine.
    #[error(transparent)]
    Shard(#[from] ShardError),
    /// A checkpoint.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The place of this process.
    #[error(transparent)]
    Place(#[from] PlaceError),
    /// The arguments of a launch.
    #[error("{0}")]
    Arguments(String),
    /// The launch of ranks.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The run folder holds another run.
    #[error("{} already holds a run: go on with --resume latest, choose another folder with --out, or remove it", .out.display())]
    Occupied {
        /// The run folder.
        out: PathBuf,
    },
    /// A file of the run folder cannot be written.
    #[error("cannot {operation} {}: {source}; choose another folder with --out", .path.display())]
    Io {
        /// What was tried.
        operation: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The loss or the gradient is not a number.
    #[error("step {step}: {what} is {value}{}; the weights were not updated. Lower optim.lr or raise optim.warmup_steps, and go on from an earlier checkpoint", .parameter.as_ref().map(|name| format!(" (first in the gradient of `{name}`)")).unwrap_or_default())]
    NonFinite {
        /// Optimizer step.
        step: u64,
        /// Loss or gradient norm.
        what: &'static str,
        /// Its value.
        value: f64,
        /// The first parameter with such a gradient.
        parameter: Option<String>,
    },
    /// A rank failed; the message names it.
    #[error("rank {rank}: {source}")]
    Rank {
        /// The rank.
        rank: usize,
        /// Its error.
        source: Box<TrainError>,
    },
    /// A rank panicked or could not start.
    #[error("{0}")]
    Crash(String),
}

impl TrainError {
    fn io(operation: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        move |source| TrainError::Io { operation, path: path.to_owned(), source }
    }

    /// Whether the user's configuration or arguments are the cause, rather than the run.
    pub fn is_usage(&self) -> bool {
        match self {
            TrainError::Config(_)
            | TrainError::Place(_)
            | TrainError::Arguments(_)
            | TrainError::Occupied { .. } => true,
            TrainError::Data(error) => error.is_usage(),
            TrainError::Checkpoint(error) => matches!(
                error,
                CheckpointError::NotFound { .. }
                    | CheckpointError::OtherModel { .. }
                    | CheckpointError::Names { .. }
                    | CheckpointError::Shape { .. }
            ),
            TrainError::Rank { source, .. } => source.is_usage(),
            _ => false,
        }
    }
}

impl From<LaunchArgsError> for TrainError {
    fn from(error: LaunchArgsError) -> Self {
        match error {
            LaunchArgsError::Place(error) => error.into(),
            LaunchArgsError::Arguments(problem) => TrainError::Arguments(problem),
            LaunchArgsError::Launch(error) => error.into(),
        }
    }
}

impl RankError for TrainError {
    fn is_consequence(&self) -> bool {
        match self {
            TrainError::Shard(error) => error.is_consequence(),
            TrainError::Checkpoint(CheckpointError::Shard(error)) => error.is_consequence(),
            TrainError::Checkpoint(CheckpointError::Rank0) => true,
            _ => false,
        }
    }
}

impl From<RanksError<TrainError>> for TrainError {
    fn from(error: RanksError<TrainError>) -> Self {
        match error {
            // Only in the engine does it matter where it went wrong. A bad file or loss is the same
            // for all ranks, whichever has met it first.
            RanksError::Failed { rank, error: TrainError::Shard(error) } => {
                TrainError::Rank { rank, source: Box::new(error.into()) }
            }
            RanksError::Failed { error, .. } => error,
            other => TrainError::Crash(other.to_string()),
        }
    }
}

/// What every rank of a run knows; nothing in it is open any more.
pub(crate) struct Plan {
    pub(crate) config: Config,
    /// `config` as TOML.
    pub(crate) config_text: String,
    pub(crate) model: ModelConfig,
    pub(crate) data: DataInfo,
    pub(crate) out: PathBuf,
    pub(crate) resume: Option<Checkpoint>,
    pub(crate) peak_flops: f64,
}

/// Trains the built-in decoder.
pub fn run(config: Config, options: &RunOptions) -> Result<Summary, TrainError> {
    run_with_blocks(config, options, |model, index, key, device| {
        Block::new(model, index, key, device)
    })
}

/// Trains a decoder with blocks of your own: `block(model, index, key, device)` makes block
/// `index`; use [`Block::key`] to name its initial weights.
pub fn run_with_blocks<B: Layer>(
    config: Config,
    options: &RunOptions,
    block: impl Fn(&ModelConfig, usize, Key, &Device) -> B + Sync,
) -> Result<Summary, TrainError> {
    let decoder = |model: &ModelConfig, key: Key, device: &Device| {
        Decoder::with_blocks(model, key, device, |index| block(model, index, key, device))
    };
    let names = |model: &ModelConfig| {
        parameter_names(&decoder(model, Key::new(config.train.seed), &device::plain()))
    };
    let plan = plan(config.clone(), options, names)?;
    let ranks = plan.config.train.ranks;
    let threads = device::threads_per_rank(&plan.config.device, ranks);
    let mut summaries = run_ranks(ranks, threads, |world| rank::run(&plan, world, &decoder))?;
    Ok(summaries.swap_remove(0))
}

/// The run folder of a configuration when none is named: `runs/<name>`, or the first free
/// `runs/<name>-2`, `-3`, … for a new run. A resumed run goes on in the last one taken.
pub fn default_out(config: &Path, resume: bool) -> PathBuf {
    let name = config.file_stem().map_or("run".into(), |name| name.to_string_lossy());
    let folder = |index: u64| match index {
        1 => Path::new("runs").join(&*name),
        index => Path::new("runs").join(format!("{name}-{index}")),
    };
    let taken =
        (1..).take_while(|index| folder(*index).join("metrics.jsonl").exists()).count() as u64;
    folder(if resume { taken.max(1) } else { taken + 1 })
}

/// Checks everything that can be checked before work starts, prepares data, and settles what is
/// open in the configuration. `names` lists the parameters of a model.
fn plan(
    mut config: Config,
    options: &RunOptions,
    names: impl Fn(&ModelConfig) -> Vec<String>,
) -> Result<Plan, TrainError> {
    config.validate()?;
    let resume = match &options.resume {
        None => None,
        Some(Resume::Latest) => Some(Checkpoint::latest(&options.out)?),
        Some(Resume::Path(path)) => Some(Checkpoint::open(path)?),
    };
    check_free(&options.out, resume.as_ref())?;
    let init = match config.init.from.as_os_str().is_empty() {
        true => None,
        false => Some(Checkpoint::open(&config.init.from)?),
    };
    let data = prepared::open(&config.data, config.train.seed)?;
    let model = resolve_model(&config, &data)?;
    if !config.train.freeze.is_empty() {
        check_freeze(&config.train.freeze, &names(&model))?;
    }
    for checkpoint in resume.iter().chain(&init) {
        checkpoint.check_model(&model)?;
    }
    for split in [Split::Train, Split::Validation] {
        TokenFile::open(&config.data.path, split, config.data.seq_len)?;
    }
    config.model = ModelSection::from_model(&model);
    let config_text = toml::to_string(&config).map_err(|error| ConfigError::Invalid {
        problems: vec![format!("the configuration cannot be written: {error}")],
    })?;
    // Not when the first checkpoint is due, which may be hours from here.
    let checkpoints = checkpoint::folder_of_run(&options.out);
    fs::create_dir_all(&checkpoints).map_err(TrainError::io("create", &checkpoints))?;
    let path = options.out.join("config.toml");
    write_beside(&path, config_text.as_bytes()).map_err(TrainError::io("write", &path))?;
    if let Some(checkpoint) = &resume {
        say(&format!("resuming from {}", checkpoint.folder().display()));
        let saved = &checkpoint.state().data_sha256;
        if saved.is_some() && *saved != data.train.sha256 {
            tracing::warn!(
                data = %config.data.path.display(),
                "the training data differs from the data that the checkpoint was trained on"
            );
        }
    }
    let peak_flops = match config.device.peak_tflops {
        Some(tflops) => tflops * 1e12,
        None => {
            let ranks = config.train.ranks;
            device::measure_peak_flops(device::threads_per_rank(&config.device, ranks) * ranks)
        }
    };
    Ok(Plan { config, config_text, model, data, out: options.out.clone(), resume, peak_flops })
}

/// Fails unless the run folder is new, or is the one that the checkpoint to go on from is in.
fn check_free(out: &Path, resume: Option<&Checkpoint>) -> Result<(), TrainError> {
    let same = |a: &Path, b: &Path| match (a.canonicalize(), b.canonicalize()) {
        (Ok(a), Ok(b)) => a == b,
        _ => false,
    };
    let own = resume.and_then(|checkpoint| checkpoint.folder().parent());
    let own = own.is_some_and(|folder| same(folder, &checkpoint::folder_of_run(out)));
    if out.join("metrics.jsonl").exists() && !own {
        return Err(TrainError::Occupied { out: out.to_owned() });
    }
    if out.exists() && !out.is_dir() {
        let problem = format!("--out {} is a file: name a folder for the run", out.display());
        return Err(ConfigError::Invalid { problems: vec![problem] }.into());
    }
    Ok(())
}

/// Fails if a name to freeze is none, which is easily a slip of the pen, or if nothing is left to
/// train.
fn check_freeze(freeze: &[String], names: &[String]) -> Result<(), ConfigError> {
    let frozen = |name: &String| freeze.iter().any(|prefix| name.starts_with(prefix.as_str()));
    let mut problems: Vec<_> = freeze
        .iter()
        .filter(|prefix| !names.iter().any(|name| name.starts_with(prefix.as_str())))
        .map(|prefix| {
            let some: Vec<_> = names.iter().take(3).map(String::as_str).collect();
            format!(
                "train.freeze: no parameter starts with \"{prefix}\"; they are called {}, …",
                some.join(", ")
            )
        })
        .collect();
    if names.iter().all(frozen) {
        problems.push(
            "train.freeze leaves nothing to train: name fewer parameters, such as \"layers.0.\""
                .to_owned(),
        );
    }
    if problems.is_empty() { Ok(()) } else { Err(ConfigError::Invalid { problems }) }
}

/// The model of the run; its vocabulary is the tokenizer's unless the configuration names one.
fn resolve_model(config: &Config, data: &DataInfo) -> Result<ModelConfig, TrainError> {
    let invalid = |problem: String| ConfigError::Invalid { problems: vec![problem] };
    // Data from another program may state fewer ids than its tokenizer has.
    let tokenizer = Tokenizer::load(data::tokenizer_of(&config.data.path)?)?;
    let tokens = data.vocab_size.max(tokenizer.vocab_size());
    let model = config.model.resolve(Some(tokens)).map_err(invalid)?;
    model.validate().map_err(|error| invalid(error.to_string()))?;
    if tokens > model.vocab_size {
        let problem = invalid(format!(
            "the tokenizer in {} has {tokens} tokens, but model.vocab_size is {}: raise \
             model.vocab_size to at least {tokens}, or leave it out",
            config.data.path.display(),
            model.vocab_size,
        ));
        return Err(problem.into());
    }
    Ok(model)
}

/// The sharding policy that a configuration describes.
pub(crate) fn policy(config: &Config) -> Policy {
    Policy {
        strategy: config.shard.strategy,
        reshard: config.shard.reshard,
        recompute: config.shard.recompute,
        compute_dtype: config.precision.compute.into(),
        reduce_dtype: config.precision.reduce.into(),
        timeout: Duration::from_secs_f64(config.comm.timeout_s),
    }
}

impl Plan {
    /// Folder of the run's checkpoints.
    pub(crate) fn checkpoints(&self) -> PathBuf {
        checkpoint::folder_of_run(&self.out)
    }

    /// Key of everything random in the run.
    pub(crate) fn key(&self) -> Key {
        Key::new(self.config.train.seed)
    }
}
