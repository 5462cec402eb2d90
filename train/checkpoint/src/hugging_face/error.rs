//! The errors of models in the layout of Hugging Face.

use std::path::{Path, PathBuf};

use kiln_model::ModelConfigError;
use kiln_model::layers::LayerError;
use kiln_sys::files;

use crate::mismatch;

/// The reason why an operation on a folder in the layout of Hugging Face failed.
#[derive(Debug, thiserror::Error)]
pub enum HuggingFaceError {
    /// A file cannot be read or written.
    #[error("cannot {operation} {path}: {source}; {}", files::advice(source))]
    Io { operation: &'static str, path: PathBuf, source: std::io::Error },
    /// The folder cannot be read as a model. `problem`: the missing part, and the fix.
    #[error("{} is not a model in the layout of Hugging Face: {problem}", .path.display())]
    NotAModel { path: PathBuf, problem: String },
    /// A link leads out of the folder.
    #[error(
        "{} is a link that leads out of its folder, to {}: copy that file into the folder if it belongs to \
         the model",
        .path.display(), .target.display()
    )]
    LeadsOut { path: PathBuf, target: PathBuf },
    /// A file that should be JSON is not.
    #[error("{} is not JSON ({problem}): get the file again", .path.display())]
    Json { path: PathBuf, problem: String },
    /// A key is missing or has a value of the wrong type.
    #[error("{}: {key} {problem}; get the file again", .path.display())]
    Key { path: PathBuf, key: String, problem: String },
    /// The model has a feature that Kiln's decoder lacks. `supported`: the supported values.
    #[error("{}: {key} = {value} is not supported: {supported}", .path.display())]
    Unsupported { path: PathBuf, key: String, value: String, supported: &'static str },
    /// The sizes are invalid.
    #[error("{} describes a model that cannot be: {source}", .path.display())]
    Shape { path: PathBuf, source: ModelConfigError },
    /// A file of weights is damaged.
    #[error("{} is damaged or not safetensors ({problem}): get the file again", .path.display())]
    Damaged { path: PathBuf, problem: String },
    /// The weights do not match the configuration. `missing`: tensors that the model needs; `unexpected`:
    /// tensors that it has no place for; `misshapen`: tensors of another shape, with both shapes.
    #[error(
        "the weights in {} are not those that its config.json describes: {}; get config.json and weights \
         from the same place",
        .path.display(), mismatch::describe(.missing, .unexpected, .misshapen)
    )]
    Names { path: PathBuf, missing: Vec<String>, unexpected: Vec<String>, misshapen: Vec<String> },
    /// The run describes a model other than the one in the folder.
    #[error(
        "{} holds another model ({}): remove these keys from the section [model], or start from another model",
        .path.display(), .differences.join(", ")
    )]
    OtherModel { path: PathBuf, differences: Vec<String> },
    /// A layer of the model cannot be created.
    #[error(transparent)]
    Layer(#[from] LayerError),
    /// No architecture of Hugging Face has all features of the model. `path`: the folder of the model;
    /// `features`: the incompatible features.
    #[error(
        "the model of {} has {features}, which no architecture that can be written has; those are Llama \
         (attention_bias none or all, with or without feed_forward_bias), Mistral (window in all layers), Qwen2 \
         (attention_bias qkv, with or without window), Qwen3 (qk_norm, attention_bias none or all, with or \
         without window) and Qwen3-MoE (as Qwen3 without window, with feed_forward moe)",
        .path.display()
    )]
    NoArchitecture { path: PathBuf, features: String },
    /// The model has a weight without a name in the layout. `path`: the folder of the model.
    #[error(
        "{} holds the weight `{name}`, which has no name in the layout of Hugging Face: only models of \
         built-in layers can be exported",
        .path.display()
    )]
    Unnamed { path: PathBuf, name: String },
    /// A weight is out of the range of the requested dtype.
    #[error("`{name}` holds {value:e}, which {dtype} cannot hold: use --dtype bf16 or f32")]
    Range { name: String, value: f32, dtype: &'static str },
    /// The output already exists.
    #[error("{} exists already: name a new folder with --out", .path.display())]
    Occupied { path: PathBuf },
    /// The repository is not written as `owner/name`. `given`: the text.
    #[error("--repo {given}: write it as owner/name, as in Qwen/Qwen3-0.6B")]
    RepoName { given: String },
    /// This build cannot download.
    #[error(
        "--repo {repo}: this build cannot download; build Kiln with `cargo build --release --features hub`, \
         or download the files and name their folder with --hf"
    )]
    NoHub { repo: String },
    /// A download failed.
    #[error(
        "cannot download {file} of {repo} (revision {revision}): {problem}; check the name, the network and \
         HF_ENDPOINT, set HF_TOKEN for a repository that asks for one, or download the files and name their \
         folder with --hf"
    )]
    Download { repo: String, revision: String, file: String, problem: String },
}

impl HuggingFaceError {
    pub(super) fn io(operation: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        move |source| HuggingFaceError::Io { operation, path: path.to_owned(), source }
    }

    /// Fails if the links of the file `name` in `folder` lead out of it. A missing file is no error.
    pub(super) fn check_inside(folder: &Path, name: &str) -> Result<(), Self> {
        let leads_out = |target| HuggingFaceError::LeadsOut { path: folder.join(name), target };
        files::way_out(folder, name).map_or(Ok(()), |target| Err(leads_out(target)))
    }

    pub(super) fn damaged(path: &Path, problem: impl std::fmt::Display) -> Self {
        HuggingFaceError::Damaged { path: path.to_owned(), problem: problem.to_string() }
    }

    /// Returns whether the user's arguments or the choice of model are the cause.
    pub fn is_usage(&self) -> bool {
        !matches!(
            self,
            HuggingFaceError::Io { .. }
                | HuggingFaceError::Json { .. }
                | HuggingFaceError::Damaged { .. }
                | HuggingFaceError::Range { .. }
                | HuggingFaceError::Download { .. }
        )
    }
}
