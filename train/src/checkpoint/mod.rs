//! Full checkpoints: the whole model in one folder, loadable at any number of ranks.
//!
//! # The folder
//!
//! `<out>/checkpoints/fsdp_cpt<step>/` holds
//!
//! | file | content |
//! |---|---|
//! | `model-0000i-of-0000n.safetensors` | weights of unit *i*, f32, under their full names |
//! | `model.safetensors.index.json` | which file holds which weight |
//! | `optimizer-0000i-of-0000n.safetensors` | `<name>.exp_avg` and `<name>.exp_avg_sq` of unit *i* |
//! | `state.json` | [`CheckpointState`]: step, data cursor, model |
//! | `config.toml`, `tokenizer.json` | what the run was started with |
//!
//! A folder is written beside its place, synced, and renamed: it is there as a whole or not at
//! all. `<out>/checkpoints/latest` names the newest one.

mod load;
mod save;

use std::path::{Path, PathBuf};

use kiln_model::ModelConfig;
use kiln_shard::ShardError;
use serde::{Deserialize, Serialize};

pub use load::Checkpoint;
pub use save::{CheckpointWriter, SaveContext};

/// The version of the folder format that this build reads and writes.
pub const FORMAT_VERSION: u64 = 1;

const STATE_FILE: &str = "state.json";
const INDEX_FILE: &str = "model.safetensors.index.json";
const TOKENIZER_FILE: &str = "tokenizer.json";
const LATEST_FILE: &str = "latest";
/// Folder of all checkpoints inside a run folder.
const CHECKPOINTS: &str = "checkpoints";
const FOLDER_PREFIX: &str = "fsdp_cpt";
const FIRST_MOMENT: &str = ".exp_avg";
const SECOND_MOMENT: &str = ".exp_avg_sq";

/// Where a run stands.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CheckpointState {
    /// [`FORMAT_VERSION`] of the build that wrote it.
    pub format_version: u64,
    /// Optimizer steps done.
    pub step: u64,
    /// Those of them whose update was left out, because a gradient was not a number.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub skipped: u64,
    /// Position in the global order of samples of the first sample that has not been trained on.
    pub next_sample: u64,
    /// Tokens trained on.
    pub tokens: u64,
    /// Shape of the model.
    pub model: ModelConfig,
    /// Number of unit files.
    pub units: usize,
    /// Checksum of the training data, to notice when a run goes on with other data.
    pub data_sha256: Option<String>,
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// What can go wrong with checkpoints.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// There is nothing to load.
    #[error("no checkpoint in {path}: {hint}")]
    NotFound {
        /// Where one was looked for.
        path: PathBuf,
        /// What to do.
        hint: &'static str,
    },
    /// A file cannot be read or written.
    #[error(
        "cannot {operation} {path}: {source}; check the path, its permissions and the free space"
    )]
    Io {
        /// What was tried.
        operation: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file is damaged or not of this format.
    #[error("{path} is damaged or not a Kiln checkpoint ({problem}): use another checkpoint")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// The run describes another model than the one that was saved.
    #[error(
        "{path} holds another model ({}): use the [model] section of its config.toml, or another checkpoint",
        .differences.join(", ")
    )]
    OtherModel {
        /// The checkpoint.
        path: PathBuf,
        /// What differs, key by key.
        differences: Vec<String>,
    },
    /// Names in the checkpoint and in the model differ.
    #[error("{path} does not fit the model: missing [{}], unexpected [{}]; load it with the [model] section of its config.toml", .missing.join(", "), .unexpected.join(", "))]
    Names {
        /// The checkpoint.
        path: PathBuf,
        /// Parameters of the model that the checkpoint lacks.
        missing: Vec<String>,
        /// Tensors of the checkpoint that the model lacks.
        unexpected: Vec<String>,
    },
    /// A tensor has another shape than the model's parameter.
    #[error(
        "`{name}` has shape {found:?} in {path}, but {expected:?} in the model; load it with the [model] section of its config.toml"
    )]
    Shape {
        /// The checkpoint file.
        path: PathBuf,
        /// Name of the parameter.
        name: String,
        /// Its shape in the file.
        found: Vec<usize>,
        /// Its shape in the model.
        expected: Vec<usize>,
    },
    /// Rank 0 failed to write; the other ranks only know that.
    #[error("rank 0 could not write the checkpoint; see its message")]
    Rank0,
    /// The engine failed.
    #[error(transparent)]
    Shard(#[from] ShardError),
}

impl CheckpointError {
    fn io(operation: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        move |source| CheckpointError::Io { operation, path: path.to_owned(), source }
    }

    /// A file of a checkpoint that is not there was there once: the checkpoint is damaged.
    fn unreadable(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        move |source| match source.kind() {
            std::io::ErrorKind::NotFound => CheckpointError::damaged(path, "the file is missing"),
            _ => CheckpointError::io("read", path)(source),
        }
    }

    fn damaged(path: &Path, problem: impl std::fmt::Display) -> Self {
        CheckpointError::Damaged { path: path.to_owned(), problem: problem.to_string() }
    }
}

/// Folder of all checkpoints of the run in `out`.
pub fn folder_of_run(out: &Path) -> PathBuf {
    out.join(CHECKPOINTS)
}

fn folder_name(step: u64) -> String {
    format!("{FOLDER_PREFIX}{step}")
}

fn step_of_folder(name: &str) -> Option<u64> {
    name.strip_prefix(FOLDER_PREFIX)?.parse().ok()
}

fn model_file(unit: usize, units: usize) -> String {
    format!("model-{:05}-of-{units:05}.safetensors", unit + 1)
}

fn optimizer_file(unit: usize, units: usize) -> String {
    format!("optimizer-{:05}-of-{units:05}.safetensors", unit + 1)
}

/// Complete checkpoints in `folder`, oldest first, as (step, path).
fn list(folder: &Path) -> Vec<(u64, PathBuf)> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut found: Vec<_> = entries
        .flatten()
        .filter_map(|entry| {
            let step = step_of_folder(entry.file_name().to_str()?)?;
            entry.path().join(STATE_FILE).exists().then(|| (step, entry.path()))
        })
        .collect();
    found.sort();
    found
}
