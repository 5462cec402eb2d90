//! What can go wrong with models in the layout of Hugging Face.

use std::path::{Path, PathBuf};

use kiln_model::ModelConfigError;
use kiln_storage::files;

use crate::mismatch;

/// What can go wrong with a folder in the layout of Hugging Face.
#[derive(Debug, thiserror::Error)]
pub enum HuggingFaceError {
    /// A file cannot be read or written.
    #[error("cannot {operation} {path}: {source}; {}", files::advice(source))]
    Io {
        /// What was tried.
        operation: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The folder is not one that can be read.
    #[error("{} is not a model in the layout of Hugging Face: {problem}", .path.display())]
    NotAModel {
        /// The folder.
        path: PathBuf,
        /// What is missing, and what to do.
        problem: String,
    },
    /// A link leads out of the folder.
    #[error("{} is a link that leads out of its folder, to {}: copy that file into the folder if it belongs to the model", .path.display(), .target.display())]
    LeadsOut {
        /// The link.
        path: PathBuf,
        /// Where it leads.
        target: PathBuf,
    },
    /// A file that should be JSON is not.
    #[error("{} is not JSON ({problem}): get the file again", .path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// A key is missing or has a value of the wrong type.
    #[error("{}: {key} {problem}; get the file again", .path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// What is wrong.
        problem: String,
    },
    /// The model has something that Kiln's decoder does not.
    #[error("{}: {key} = {value} is not supported: {supported}", .path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// Its value.
        value: String,
        /// What is.
        supported: &'static str,
    },
    /// The sizes fit no model.
    #[error("{} describes a model that cannot be: {source}", .path.display())]
    Shape {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: ModelConfigError,
    },
    /// A file of weights is damaged.
    #[error("{} is damaged or not safetensors ({problem}): get the file again", .path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// The weights are not those that the configuration describes.
    #[error("the weights in {} are not those that its config.json describes: {}; get config.json and weights from the same place", .path.display(), mismatch::describe(.missing, .unexpected, .misshapen))]
    Names {
        /// The folder.
        path: PathBuf,
        /// Tensors that the model needs.
        missing: Vec<String>,
        /// Tensors that it has no place for.
        unexpected: Vec<String>,
        /// Tensors of another shape, with both.
        misshapen: Vec<String>,
    },
    /// The run describes another model than the one in the folder.
    #[error(
        "{} holds another model ({}): set these keys in the section [model], or start from another model",
        .path.display(), .differences.join(", ")
    )]
    OtherModel {
        /// The folder.
        path: PathBuf,
        /// What differs, key by key.
        differences: Vec<String>,
    },
    /// No architecture of Hugging Face has what the model has.
    #[error(
        "the model of {} has {features}, which no architecture that can be written has; those are Llama (attention_bias none or all, with or without feed_forward_bias), Qwen2 (attention_bias qkv) and Qwen3 (qk_norm, attention_bias none or all)",
        .path.display()
    )]
    NoArchitecture {
        /// The folder of the model.
        path: PathBuf,
        /// What does not go together.
        features: String,
    },
    /// The model has a weight that the layout has no name for.
    #[error("{} holds the weight `{name}`, which has no name in the layout of Hugging Face: only models of built-in layers can be exported", .path.display())]
    Unnamed {
        /// The folder of the model.
        path: PathBuf,
        /// The weight.
        name: String,
    },
    /// A weight does not fit the dtype asked for.
    #[error("`{name}` holds {value:e}, which {dtype} cannot hold: use --dtype bf16 or f32")]
    Range {
        /// The weight.
        name: String,
        /// The value.
        value: f32,
        /// The dtype.
        dtype: &'static str,
    },
    /// There is something in the place of the output.
    #[error("{} exists already: name a new folder with --out", .path.display())]
    Occupied {
        /// The output.
        path: PathBuf,
    },
    /// `owner/name` is written in another way.
    #[error("--repo {given}: write it as owner/name, as in Qwen/Qwen3-0.6B")]
    RepoName {
        /// What was written.
        given: String,
    },
    /// This build cannot download.
    #[error(
        "--repo {repo}: this build cannot download; build Kiln with `cargo build --release --features hub`, or download the files and name their folder with --hf"
    )]
    NoHub {
        /// The repository.
        repo: String,
    },
    /// A download failed.
    #[error(
        "cannot download {file} of {repo} (revision {revision}): {problem}; check the name, the network and HF_ENDPOINT, set HF_TOKEN for a repository that asks for one, or download the files and name their folder with --hf"
    )]
    Download {
        /// The repository.
        repo: String,
        /// Its revision.
        revision: String,
        /// The file.
        file: String,
        /// The client's reason.
        problem: String,
    },
}

impl HuggingFaceError {
    pub(super) fn io(operation: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        move |source| HuggingFaceError::Io { operation, path: path.to_owned(), source }
    }

    /// Fails if the links of the file `name` in `folder` lead out of it. What is not there does not.
    pub(super) fn check_inside(folder: &Path, name: &str) -> Result<(), Self> {
        let leads_out = |target| HuggingFaceError::LeadsOut { path: folder.join(name), target };
        files::way_out(folder, name).map_or(Ok(()), |target| Err(leads_out(target)))
    }

    pub(super) fn damaged(path: &Path, problem: impl std::fmt::Display) -> Self {
        HuggingFaceError::Damaged { path: path.to_owned(), problem: problem.to_string() }
    }

    /// Whether the user's arguments or the choice of model are the cause, rather than the work.
    pub fn is_usage(&self) -> bool {
        match self {
            HuggingFaceError::NotAModel { .. }
            | HuggingFaceError::LeadsOut { .. }
            | HuggingFaceError::Key { .. }
            | HuggingFaceError::Unsupported { .. }
            | HuggingFaceError::Shape { .. }
            | HuggingFaceError::Names { .. }
            | HuggingFaceError::OtherModel { .. }
            | HuggingFaceError::NoArchitecture { .. }
            | HuggingFaceError::Unnamed { .. }
            | HuggingFaceError::Occupied { .. }
            | HuggingFaceError::RepoName { .. }
            | HuggingFaceError::NoHub { .. } => true,
            HuggingFaceError::Io { .. }
            | HuggingFaceError::Json { .. }
            | HuggingFaceError::Damaged { .. }
            | HuggingFaceError::Range { .. }
            | HuggingFaceError::Download { .. } => false,
        }
    }
}
