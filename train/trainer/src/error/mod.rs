//! Errors of a run.

mod eval;
mod folder;

use std::error::Error;
use std::fmt;
use std::path::{Path, PathBuf};

use kiln_collectives::CommError;
use kiln_collectives::tcp::JoinError;
use kiln_model::layers::LayerError;
use kiln_shard::ShardError;
use kiln_shard::ranks::{RankError, RanksError};

use crate::logged::MetricError;
use clap::ValueEnum;
use kiln_checkpoint::CheckpointError;
use kiln_config::ConfigError;
use kiln_config::device::DeviceError;
use kiln_config::links::LinksError;
use kiln_data::DataError;
use kiln_launch::LaunchArgsError;
use kiln_launch::place::EnvError;
use kiln_sys::GraceError;
use kiln_sys::words::{number_of, size};

pub use eval::EvalError;
pub use folder::FolderError;

/// Number of consecutive skipped updates that ends a run under `train.nonfinite = "skip"`.
pub const MAX_SKIPPED: u64 = 10;

/// The result of an operation that is part of training.
pub type Result<T, E = TrainError> = std::result::Result<T, E>;

/// Reasons why a run fails.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The configuration is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The device cannot be used.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The run needs more memory than there is.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A layer of the model cannot be built.
    #[error(transparent)]
    Layer(#[from] LayerError),
    /// The data cannot be used.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The sharding engine failed.
    #[error(transparent)]
    Shard(#[from] ShardError),
    /// The ranks lost contact; their flight recordings are in this run folder.
    #[error("{}; compare what the ranks were doing with `kiln inspect flight {}`", .0, .1.display())]
    Recorded(#[source] ShardError, PathBuf),
    /// A custom training loop failed.
    #[error("the training loop: {}", with_causes(.0))]
    Loop(#[source] BoxError),
    /// A command that the program adds failed.
    #[error("{name}: {}", with_causes(.source))]
    Command { name: &'static str, source: BoxError },
    /// A metric that the program adds failed.
    #[error(transparent)]
    Metric(MetricError),
    /// The values that the ranks' layers recorded cannot be combined.
    #[error("cannot combine the ranks' layer records: {reason}")]
    Records {
        /// The cause, as text.
        reason: String,
    },
    /// A checkpoint cannot be used.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// An evaluation failed.
    #[error(transparent)]
    Eval(#[from] EvalError),
    /// The grace period of this process is invalid.
    #[error(transparent)]
    Grace(#[from] GraceError),
    /// The environment does not make clear which rank this process is.
    #[error(transparent)]
    Env(#[from] EnvError),
    /// The ranks could not be launched.
    #[error(transparent)]
    Launch(#[from] LaunchArgsError),
    /// A file with network measurements cannot be used.
    #[error(transparent)]
    Links(#[from] LinksError),
    /// This process could not connect to the other ranks.
    #[error(transparent)]
    Join(#[from] JoinError),
    /// This process could not join its MPI job.
    #[cfg(feature = "mpi")]
    #[error(transparent)]
    Mpi(#[from] kiln_collectives::mpi::MpiError),
    /// NCCL could not connect this rank's GPU with the GPUs of the other ranks.
    #[cfg(feature = "cuda")]
    #[error("rank {rank} cannot connect its GPU {index} with those of the other ranks: {source}")]
    Nccl { rank: usize, index: usize, source: Box<kiln_collectives::nccl::NcclError> },
    /// These ranks, which are processes, were started differently from rank 0.
    #[error(
        "ranks {0:?} do not have the same configuration, arguments and build as rank 0: start every rank \
         with the same command. If they belong to another job that uses the same port, give each job its own \
         port (MASTER_PORT), name (TORCHELASTIC_RUN_ID, --rdzv-id) or secret (KILN_JOB_SECRET)"
    )]
    OtherConfig(Vec<usize>),
    /// Rank 0 failed with `message`; `usage` is true if the configuration or the arguments are the cause.
    #[error("rank 0 could not start the run: {message}")]
    Rank0 { message: String, usage: bool },
    /// The run folder cannot be used.
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// Resuming from `path` would continue elsewhere in the data, because these `keys` have changed.
    #[error(
        "{} was trained with different values, and continuing would read the data at a different position: \
         {}. Use the earlier values, or accept the different position with {}",
        .path.display(), .differences.join(", "), allow(.keys)
    )]
    OtherPosition { path: PathBuf, keys: Vec<PositionKey>, differences: Vec<String> },
    /// The loss or gradient norm, `what`, is not finite; `parameter` has the first non-finite gradient.
    #[error(
        "step {step}: {what} is {value}{}{origin}{}. Lower optim.lr or raise optim.warmup_steps, and continue from an \
         earlier checkpoint",
        in_gradient(.parameter), not_updated(*.is_repeated)
    )]
    NonFinite {
        step: u64,
        what: &'static str,
        value: f64,
        parameter: Option<String>,
        origin: String,
        is_repeated: bool,
    },
    /// A quantity that the model computed, `what`, is not finite.
    #[error(
        "{what} is {value}: the model computes with numbers that are too large; use an earlier checkpoint, \
         or a different model"
    )]
    NotANumber { what: &'static str, value: f64 },
    /// A smoke run that resumed from its own checkpoint has different losses from the uninterrupted run.
    #[error(
        "smoke: the run resumed from the middle ends with training and validation losses of {resumed:?}, and \
         the uninterrupted run with {straight:?}: the program keeps state that checkpoints do not store, or \
         draws random numbers without a seed"
    )]
    Smoke { straight: [f64; 2], resumed: [f64; 2] },
    /// `kiln check` found problems and printed them.
    #[error("kiln check: {}; the lines above that begin with \"fail\" say what to do", number_of(*.failures, "failure"))]
    Check { failures: usize },
    /// The file to write exists already.
    #[error("{} already exists: overwrite it with --force, or name another file with --out", .0.display())]
    Exists(PathBuf),
    /// A stop was requested while this process waited for the other ranks.
    #[error(
        "stopped on request before the ranks were connected: there was nothing to save yet; start it again"
    )]
    Stopped,
    /// A fault drill, not a real fault.
    #[error("{0}")]
    Drill(String),
    /// The engine failed on a rank, which the message names.
    #[error("rank {rank}: {source}")]
    Rank { rank: usize, source: Box<TrainError> },
    /// The system cannot start more threads; `reason` is the system's message.
    #[error(
        "cannot start {what}: {reason}; allow more processes and threads (`ulimit -u`, or the limit of the \
         container), or use fewer ranks or a smaller device.threads"
    )]
    Threads { what: String, reason: String },
    /// A rank panicked.
    #[error("{0}")]
    Crash(String),
}

/// The error for a run that cannot fit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this run takes {} of memory, and {there}:\n{table}What would help:\n{helps}\
     If there is more memory than that, set it: --set device.memory={}GiB",
    size(*.needed), .needed.div_ceil(1 << 30)
)]
pub struct MemoryError {
    pub(crate) needed: u64,
    pub(crate) there: String,
    pub(crate) table: String,
    pub(crate) helps: String,
}

/// A key that the position in the data depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PositionKey {
    /// Tokens per sequence.
    #[value(name = "data.seq_len")]
    SeqLen,
    /// The setting that samples are visited in random order.
    #[value(name = "data.shuffle")]
    Shuffle,
    /// The seed of the sample order and of dropout.
    #[value(name = "train.seed")]
    Seed,
    /// The training data itself.
    #[value(name = "data")]
    Data,
}

impl fmt::Display for PositionKey {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        self.to_possible_value().map_or(Ok(()), |value| f.write_str(value.get_name()))
    }
}

type BoxError = Box<dyn Error + Send + Sync>;

impl TrainError {
    /// Converts an error from user code: unwraps one of Kiln's own errors, and passes any other error to `other`.
    fn from_program(error: BoxError, other: impl FnOnce(BoxError) -> TrainError) -> Self {
        fn take<E: Error + Into<TrainError> + 'static>(error: BoxError) -> Result<BoxError, TrainError> {
            error.downcast::<E>().map_or_else(Ok, |error| Err((*error).into()))
        }
        let ours = take::<TrainError>(error)
            .and_then(take::<ShardError>)
            .and_then(take::<ConfigError>)
            .and_then(take::<CheckpointError>)
            .and_then(take::<DataError>);
        match ours {
            Ok(error) => other(error),
            Err(ours) => ours,
        }
    }

    /// Converts an error that ended a training loop.
    pub fn from_loop(error: BoxError) -> Self {
        Self::from_program(error, TrainError::Loop)
    }
}

impl From<MetricError> for TrainError {
    fn from(MetricError { name, source }: MetricError) -> Self {
        Self::from_program(source, |source| TrainError::Metric(MetricError { name, source }))
    }
}

/// Joins the messages of an error and its causes, except those that end the message of their effect.
fn with_causes(error: &BoxError) -> String {
    causes(&**error).map(ToString::to_string).fold(String::new(), |text, cause| match text {
        text if text.is_empty() => cause,
        text if text.ends_with(&cause) => text,
        text => format!("{text}: {cause}"),
    })
}

/// Iterates over an error and its causes.
pub fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |&error| error.source())
}

fn any_of(error: &BoxError, kind: fn(&TrainError) -> bool) -> bool {
    causes(&**error).any(|error| error.downcast_ref::<TrainError>().is_some_and(kind))
}

fn allow(keys: &[PositionKey]) -> String {
    let flags: Vec<_> = keys.iter().map(|key| format!("--allow-changed {key}")).collect();
    flags.join(" ")
}

/// Names the parameter whose gradient is not finite, if one is known.
pub fn in_gradient(parameter: &Option<String>) -> String {
    parameter.as_ref().map_or_else(String::new, |name| format!(" (first in the gradient of `{name}`)"))
}

fn not_updated(is_repeated: bool) -> String {
    match is_repeated {
        true => format!(", as in the {} steps before; none of them updated the weights", MAX_SKIPPED - 1),
        false => "; the weights were not updated".to_owned(),
    }
}

impl TrainError {
    /// Returns a function that converts an I/O error of `operation` on the file `path`.
    pub fn io(operation: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        move |error| FolderError::io(operation, path)(error).into()
    }

    /// Returns a function that converts the failure to start `what`, which describes one or more threads.
    pub fn threads(what: &str) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.to_owned();
        move |source| TrainError::Threads { what, reason: source.to_string() }
    }

    /// Creates an error about a mistake in the configuration or the arguments.
    pub fn usage(problem: impl Into<String>) -> Self {
        ConfigError::invalid(problem).into()
    }

    /// Returns whether the user's configuration or arguments caused the error.
    pub fn is_usage(&self) -> bool {
        match self {
            TrainError::Config(_)
            | TrainError::Layer(_)
            | TrainError::Device(_)
            | TrainError::Memory(_)
            | TrainError::Env(_)
            | TrainError::Grace(_)
            | TrainError::Links(_)
            | TrainError::OtherConfig(_)
            | TrainError::Exists(_)
            | TrainError::OtherPosition { .. } => true,
            TrainError::Folder(error) => error.is_usage(),
            TrainError::Loop(error) => any_of(error, TrainError::is_usage),
            TrainError::Rank0 { usage, .. } => *usage,
            TrainError::Launch(error) => error.is_usage(),
            TrainError::Join(error) => matches!(
                error,
                JoinError::OpenSecret { .. }
                    | JoinError::SealWithoutSecret { .. }
                    | JoinError::OtherSettings { .. }
                    | JoinError::Refused { .. }
            ),
            TrainError::Data(error) => error.is_usage(),
            TrainError::Eval(error) => error.is_usage(),
            TrainError::Checkpoint(error) => error.is_usage(),
            TrainError::Rank { source, .. } => source.is_usage(),
            _ => false,
        }
    }

    /// Returns whether the run was stopped on request, before there was anything to save.
    pub fn is_stop(&self) -> bool {
        matches!(self, TrainError::Stopped | TrainError::Data(DataError::Stopped))
    }

    /// Adds the location of the flight recordings, if these can explain the error.
    pub fn with_flights(self, out: &Path) -> Self {
        match self {
            TrainError::Shard(source @ ShardError::Comm(_))
            | TrainError::Checkpoint(CheckpointError::Shard(source @ ShardError::Comm(_))) => {
                TrainError::Recorded(source, out.to_owned())
            }
            other => other,
        }
    }
}

impl RankError for TrainError {
    fn is_consequence(&self) -> bool {
        match self {
            TrainError::Shard(error) | TrainError::Recorded(error, _) => error.is_consequence(),
            TrainError::Checkpoint(error) => error.is_consequence(),
            TrainError::Rank0 { .. } => true,
            TrainError::Loop(error) | TrainError::Command { source: error, .. } => {
                let of_engine = |error: &ShardError| error.is_consequence();
                let of_world = |error: &CommError| matches!(error, CommError::Aborted { .. });
                any_of(error, RankError::is_consequence)
                    || causes(&**error).any(|error| {
                        error.downcast_ref().is_some_and(of_engine)
                            || error.downcast_ref().is_some_and(of_world)
                    })
            }
            TrainError::Rank { source, .. } => source.is_consequence(),
            #[cfg(feature = "cuda")]
            TrainError::Nccl { source, .. } => {
                use kiln_collectives::nccl::NcclError;
                matches!(**source, NcclError::Peers { .. } | NcclError::Group(CommError::Aborted { .. }))
            }
            _ => false,
        }
    }
}

impl From<RanksError<TrainError>> for TrainError {
    fn from(error: RanksError<TrainError>) -> Self {
        match error {
            // Only errors of the engine depend on the rank; a bad file or loss is the same on all ranks.
            RanksError::Failed {
                rank,
                error: source @ (TrainError::Shard(_) | TrainError::Recorded(..)),
            } => TrainError::Rank { rank, source: Box::new(source) },
            RanksError::Failed { error, .. } => error,
            RanksError::Spawn { rank, reason } => {
                TrainError::Threads { what: format!("the threads of rank {rank}"), reason }
            }
            other => TrainError::Crash(other.to_string()),
        }
    }
}
