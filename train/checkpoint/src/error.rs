//! The errors of checkpoints.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use kiln_collectives::BufferError;
use kiln_data::DataError;
use kiln_model::layers::LayerError;
use kiln_shard::ShardError;
use kiln_sys::files;

use super::SavedOptimizer;
use crate::hugging_face::HuggingFaceError;
use crate::mismatch;

/// The result of operations on checkpoints.
pub(super) type Result<T, E = CheckpointError> = std::result::Result<T, E>;

/// The reason why an operation on checkpoints failed.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// There is nothing to load. `path`: the searched folder; `hint`: the fix.
    #[error("no checkpoint in {path}: {hint}")]
    NotFound { path: PathBuf, hint: &'static str },
    /// There are folders of checkpoints, but none can be loaded. `path`: the searched folder; `found`: the
    /// checkpoints, and the fault of each.
    #[error(
        "no checkpoint in {path} can be used:{}\nPut back what is missing or mend its permissions, or use \
         another checkpoint",
        .found.iter().map(|(folder, why)| format!("\n  - {}: {why}", folder.display())).collect::<String>()
    )]
    NoneUsable { path: PathBuf, found: Vec<(PathBuf, String)> },
    /// A checkpoint is damaged, but an earlier one of its run is readable. `earlier`: the newest of those.
    #[error("{source}, such as {}", .earlier.display())]
    DamagedButEarlier { source: Box<CheckpointError>, earlier: PathBuf },
    /// A file cannot be read or written.
    #[error("cannot {operation} {path}: {source}; {}", files::advice(source))]
    Io { operation: &'static str, path: PathBuf, source: std::io::Error },
    /// A file is damaged or has another format.
    #[error("{path} is damaged or not a Kiln checkpoint ({problem}): use another checkpoint")]
    Damaged { path: PathBuf, problem: String },
    /// The run describes a model other than the saved one.
    #[error(
        "{path} holds another model ({}): remove these keys from the section [model], or use another checkpoint",
        .differences.join(", ")
    )]
    OtherModel { path: PathBuf, differences: Vec<String> },
    /// The checkpoint's weights belong to parts of a model that this program does not build. `objection`: the
    /// parts, and the fix.
    #[error("{path} {objection}, or use another checkpoint")]
    OtherArchitecture { path: PathBuf, objection: String },
    /// A layer of the model cannot be created.
    #[error(transparent)]
    Layer(#[from] LayerError),
    /// The checkpoint's moments belong to another optimizer. `saved`: the optimizer that trained it; `here`:
    /// the optimizer of this run.
    #[error(
        "{path} was trained with the optimizer {saved}, and this run has {here}: set optim.kind = \"{}\", in a \
         program that has it, or start a new run from its weights alone with init.from", saved.name
    )]
    OtherOptimizer { path: PathBuf, saved: Box<SavedOptimizer>, here: Box<SavedOptimizer> },
    /// The optimizer needs values of these names, such as `exp_avg` of a parameter, which the checkpoint
    /// lacks.
    #[error(
        "{path} has no state of the optimizer for {}: these parameters were updated by another rule. Use the \
         [[optim.groups]] of its config.toml, or start a new run from its weights alone with init.from",
        mismatch::first_of(.missing)
    )]
    Slots { path: PathBuf, missing: Vec<String> },
    /// Names or shapes in the checkpoint and in the model differ. `missing`: parameters of the model that the
    /// checkpoint lacks; `unexpected`: tensors of the checkpoint that the model lacks; `misshapen`: tensors
    /// with another shape than in the model, with both shapes.
    #[error(
        "{path} does not fit the model: {}; use the [model] section of its config.toml{}",
        mismatch::describe(.missing, .unexpected, .misshapen),
        if .missing.is_empty() { "" } else { ", or say with --allow-missing what may be missing" }
    )]
    Names { path: PathBuf, missing: Vec<String>, unexpected: Vec<String>, misshapen: Vec<String> },
    /// The weights are unchanged since they were saved, but not all are finite. `path`: the checkpoint, or
    /// the folder in the layout of Hugging Face; `name`: the first such weight; `value`: its first such
    /// value; `all`: the number of such values, and of weights that have any, if all weights were checked.
    #[error(
        "{path} cannot be used: its weight `{name}` holds {value}, and weights must be finite numbers{}. \
         Use an earlier checkpoint, or get the model again",
        .all.map_or_else(String::new, |(values, weights)| such_values(values, weights))
    )]
    NotFinite { path: PathBuf, name: String, value: f32, all: Option<(usize, usize)> },
    /// The metadata that a program supplies for its checkpoint does not match the contents. `problem`: the
    /// mismatch.
    #[error("this checkpoint could not be read again: {problem}; mend the SaveContext")]
    Context { problem: String },
    /// The output folder already exists.
    #[error("{path} exists already: name a new folder with --out")]
    Exists { path: PathBuf },
    /// Ranks have written their parts, but the rank that completes the checkpoint does not see them.
    /// `folder`: where they were expected; `ranks`: the ranks that wrote them; `seconds`: the time waited.
    #[error(
        "the parts of ranks {ranks:?} are not all in {folder}, {seconds:.0} s after every rank had written \
         its own: make sure that all ranks write to the same file system and that nothing removes files \
         there, or raise checkpoint.timeout_s"
    )]
    MissingParts { folder: PathBuf, ranks: Vec<usize>, seconds: f64 },
    /// The run folder is no longer the one that the run has locked. `folder`: its path at the start of the
    /// run.
    #[error(
        "{} is no longer this run's folder: it was moved, removed or replaced while the run went on, so \
         nothing more is written there. Go on from the run's last checkpoint where the folder is now, with \
         --resume",
        .folder.display()
    )]
    NotHeld { folder: PathBuf },
    /// The disk does not respond. `path`: the output folder; `seconds`: the time waited.
    #[error(
        "nothing has been written to {path} for {seconds:.0} s: check the disk, or raise checkpoint.timeout_s"
    )]
    Stalled { path: PathBuf, seconds: f64 },
    /// Another rank failed to write; this rank only knows that.
    #[error("another rank could not write the checkpoint; see its message")]
    OtherRank,
    /// An error of a folder in the layout of Hugging Face.
    #[error(transparent)]
    HuggingFace(#[from] HuggingFaceError),
    /// An error of a model's tokenizer.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The engine failed.
    #[error(transparent)]
    Shard(#[from] ShardError),
}

/// Describes how many values are not finite, in how many weights.
fn such_values(values: usize, weights: usize) -> String {
    let plural = |count: usize| if count == 1 { "" } else { "s" };
    let (value, weight) = (plural(values), plural(weights));
    format!(": it has {values} such value{value}, in {weights} weight{weight}")
}

impl CheckpointError {
    pub(crate) fn io(operation: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        move |source| CheckpointError::Io { operation, path: path.to_owned(), source }
    }

    /// Returns the error for a file of a checkpoint. A missing file means that the checkpoint is damaged,
    /// because it existed once.
    pub(crate) fn unreadable(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        move |source| match source.kind() {
            ErrorKind::NotFound => CheckpointError::damaged(path, "the file is missing"),
            ErrorKind::InvalidInput | ErrorKind::FileTooLarge => CheckpointError::damaged(path, source),
            _ => CheckpointError::io("read", path)(source),
        }
    }

    pub(crate) fn damaged(path: &Path, problem: impl std::fmt::Display) -> Self {
        CheckpointError::Damaged { path: path.to_owned(), problem: problem.to_string() }
    }

    /// Returns the error for the tensor `key` in the file `path`, which does not match its checksum.
    pub(super) fn damaged_tensor(path: &Path, key: &str) -> Self {
        CheckpointError::damaged(path, format!("`{key}` does not match its checksum"))
    }

    /// Returns whether the user's arguments or the choice of model are the cause.
    pub fn is_usage(&self) -> bool {
        match self {
            CheckpointError::HuggingFace(error) => error.is_usage(),
            CheckpointError::Data(error) => error.is_usage(),
            CheckpointError::NotFound { .. }
            | CheckpointError::NoneUsable { .. }
            | CheckpointError::OtherModel { .. }
            | CheckpointError::OtherArchitecture { .. }
            | CheckpointError::Layer(_)
            | CheckpointError::OtherOptimizer { .. }
            | CheckpointError::Names { .. }
            | CheckpointError::Exists { .. } => true,
            _ => false,
        }
    }

    /// Returns whether it only reports that another rank failed.
    pub fn is_consequence(&self) -> bool {
        match self {
            CheckpointError::OtherRank => true,
            CheckpointError::Shard(error) => kiln_shard::ranks::RankError::is_consequence(error),
            _ => false,
        }
    }
}

impl From<BufferError> for CheckpointError {
    fn from(error: BufferError) -> Self {
        ShardError::from(error).into()
    }
}
