use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use kiln_collectives::BufferError;
use kiln_data::DataError;
use kiln_model::ModelConfigError;
use kiln_model::layers::{HEAD_LAYER_PREFIX, LayerError};
use kiln_shard::ShardError;
use kiln_sys::files;
use kiln_sys::words::number_of;

use crate::SavedOptimizer;

pub(crate) type Result<T, E = CheckpointError> = std::result::Result<T, E>;

/// A failure of an operation on a model on disk.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// There is nothing to load in `path`. `hint`: the fix.
    #[error("no checkpoint in {path}: {hint}")]
    NotFound { path: PathBuf, hint: &'static str },
    /// None of the checkpoints in `path` can be loaded. `found`: each checkpoint and its problem.
    #[error(
        "no checkpoint in {path} can be used:{}\nRestore the missing file or fix its permissions, or use \
         another checkpoint",
        .found.iter().map(|(folder, why)| format!("\n  - {}: {why}", folder.display())).collect::<String>()
    )]
    NoneUsable { path: PathBuf, found: Vec<(PathBuf, String)> },
    /// A checkpoint is damaged, but an earlier checkpoint of its run can be read. `earlier`: the newest of these.
    #[error("{source}, such as {}", .earlier.display())]
    DamagedButEarlier { source: Box<CheckpointError>, earlier: PathBuf },
    /// A file cannot be read or written.
    #[error("cannot {operation} {path}: {source}; {}", files::advice(source))]
    Io { operation: &'static str, path: PathBuf, source: std::io::Error },
    /// A file of a checkpoint is damaged or has a different format version.
    #[error("{path} is damaged or not a Kiln checkpoint ({problem}): use another checkpoint")]
    Damaged { path: PathBuf, problem: String },
    /// The checkpoint's model differs from the run's. `instead`: an alternative to changing the run.
    #[error(
        "{path} holds another model ({}): remove these keys from the section [model], or {instead}",
        .differences.join(", ")
    )]
    OtherModel { path: PathBuf, differences: Vec<String>, instead: &'static str },
    /// The checkpoint needs parts that this program lacks. `objection`: the parts, and the fix.
    #[error("{path} {objection}, or use another checkpoint")]
    OtherArchitecture { path: PathBuf, objection: String },
    /// A layer of the model cannot be created.
    #[error(transparent)]
    Layer(#[from] LayerError),
    /// The checkpoint's optimizer, `saved`, differs from this run's optimizer, `here`.
    #[error(
        "{path} was trained with the optimizer {saved}, and this run has {here}: set optim.kind = \"{}\", in a \
         program that has it, or start a new run from its weights alone with init.from", saved.name
    )]
    OtherOptimizer { path: PathBuf, saved: Box<SavedOptimizer>, here: Box<SavedOptimizer> },
    /// The checkpoint lacks optimizer state that the run needs. `missing`: names such as `exp_avg` of a parameter.
    #[error(
        "{path} has no optimizer state for {}: these parameters were updated by another rule. Use the \
         [[optim.groups]] of its config.toml, or start a new run from its weights alone with init.from",
        first_of(.missing)
    )]
    Slots { path: PathBuf, missing: Vec<String> },
    /// The checkpoint lacks optimizer state, because the parameters `names` were frozen.
    #[error(
        "{path} has no optimizer state for {}: these parameters were frozen. Use train.freeze and train.train_only of \
         its config.toml, or start a new run from its weights alone with init.from",
        first_of(.names)
    )]
    Frozen { path: PathBuf, names: Vec<String> },
    /// Names or shapes in the checkpoint and in the model differ.
    #[error(
        "{path} does not fit the model: {mismatch}; use the [model] section of its config.toml{}",
        match (.mismatch.missing.is_empty(), .mismatch.lacks_head_layer()) {
            (false, _) => ", or allow weights to be missing with --allow-missing",
            (true, true) => ", or leave weights out with --allow-missing",
            (true, false) => "",
        }
    )]
    Names { path: PathBuf, mismatch: Mismatch },
    /// The weights are not all finite. `name`, `value`: the first weight with a non-finite value, and this value;
    /// `all`: the numbers of such values and weights, if all weights were checked.
    #[error(
        "{path} cannot be used: its weight `{name}` holds {value}, and weights must be finite numbers{}. \
         Use an earlier checkpoint, or get the model again",
        .all.map_or_else(String::new, |(values, weights)| format!(
            ": it has {}, in {}", number_of(values, "such value"), number_of(weights, "weight")
        ))
    )]
    NotFinite { path: PathBuf, name: String, value: f32, all: Option<(usize, usize)> },
    /// The metadata that a program supplies does not match the checkpoint. `problem`: the mismatch.
    #[error("this checkpoint could not be read again: {problem}; fix the SaveContext")]
    Context { problem: String },
    /// The output folder already exists.
    #[error("{path} exists already: name a new folder with --out")]
    Exists { path: PathBuf },
    /// The rank that completes the checkpoint cannot see the parts that `ranks` have written to `folder`. `seconds`:
    /// length of the wait.
    #[error(
        "the parts of ranks {ranks:?} are not all in {folder}, {seconds:.0} s after every rank wrote its \
         own: make sure that all ranks write to the same file system and that nothing removes files there, \
         or raise checkpoint.timeout_s"
    )]
    MissingParts { folder: PathBuf, ranks: Vec<usize>, seconds: f64 },
    /// The run folder is no longer the folder that the run locked. `folder`: its original path.
    #[error(
        "{folder} is no longer this run's folder: it was moved, removed or replaced during the run, so \
         nothing more is written there. Resume from the run's last checkpoint, wherever its folder is now, \
         with --resume"
    )]
    NotHeld { folder: PathBuf },
    /// The disk does not respond. `path`: the output folder; `seconds`: length of the wait.
    #[error(
        "nothing has been written to {path} for {seconds:.0} s: check the disk, or raise checkpoint.timeout_s"
    )]
    Stalled { path: PathBuf, seconds: f64 },
    /// Another rank failed and reports the cause.
    #[error("another rank could not write the checkpoint; see its message")]
    OtherRank,
    /// A folder is not a model in the Hugging Face layout. `problem`: the cause and the fix.
    #[error("{path} is not a model in the layout of Hugging Face: {problem}")]
    NotAModel { path: PathBuf, problem: &'static str },
    /// A file in a model's folder is a link that leads out of the folder.
    #[error(
        "{path} is a link that leads out of its folder, to {target}: copy that file into the folder if it \
         belongs to the model"
    )]
    LeadsOut { path: PathBuf, target: PathBuf },
    /// A file that should be JSON is not.
    #[error("{path} is not JSON ({problem}): get the file again")]
    Json { path: PathBuf, problem: String },
    /// A key of a model's JSON file is missing or has a value of the wrong type.
    #[error("{path}: {key} {problem}; get the file again")]
    Key { path: PathBuf, key: String, problem: String },
    /// The model has a feature that Kiln's decoder lacks. `supported`: the supported values.
    #[error("{path}: {key} = {value} is not supported; Kiln supports {supported}")]
    Unsupported { path: PathBuf, key: String, value: String, supported: &'static str },
    /// The sizes in a `config.json` are invalid.
    #[error("{path} describes an impossible model: {source}")]
    Shape { path: PathBuf, source: ModelConfigError },
    /// A weight file in the Hugging Face layout is damaged.
    #[error("{path} is damaged or not safetensors ({problem}): get the file again")]
    DamagedWeights { path: PathBuf, problem: String },
    /// Names or shapes of tensors do not match the model's `config.json`.
    #[error(
        "the weights in {path} do not match its config.json: {mismatch}; get config.json and weights from \
         the same source"
    )]
    Tensors { path: PathBuf, mismatch: Mismatch },
    /// Adapters do not fit the model that they name.
    #[error("the adapters in {path} do not fit the model that their adapter_config.json names: {mismatch}")]
    Adapters { path: PathBuf, mismatch: Mismatch },
    /// The model that adapters name cannot be used. `problem`: the reason.
    #[error("{path}/adapter_config.json: base_model_name_or_path {problem}", path = .path.display())]
    BaseModel { path: PathBuf, problem: String },
    /// The model that the adapters of a checkpoint change cannot be used. `base`: its folder; `problem`: the reason.
    #[error(
        "{path} contains only the adapters of the model in {base}, which {problem}: put that model back there, or name \
         its new folder with --set init.from=FOLDER when you resume"
    )]
    Base { path: PathBuf, base: PathBuf, problem: String },
    /// `--merge` was requested for a model without adapters.
    #[error("{path} has no adapters to merge: omit --merge")]
    NoAdapters { path: PathBuf },
    /// A model with adapters was given where the run has none.
    #[error(
        "{path} has adapters, and this run has none: keep training them with the same [lora] section, or merge them \
         with `kiln export --merge` and start from the result"
    )]
    UnusedAdapters { path: PathBuf },
    /// No Hugging Face architecture has all `features` of the model in `path`.
    #[error(
        "the model of {path} has {features}, which no supported architecture of Hugging Face has; those are \
         Llama (attention_bias none or all, with or without feed_forward_bias), Mistral (window in all layers), \
         Qwen2 (attention_bias qkv, with or without window), Qwen3 (qk_norm, attention_bias none or all, with or \
         without window) and Qwen3-MoE (as Qwen3 without window, with feed_forward moe)"
    )]
    NoArchitecture { path: PathBuf, features: String },
    /// A weight has no name in the Hugging Face layout.
    #[error(
        "{path} holds the weight `{name}`, which has no name in the layout of Hugging Face: only models of \
         built-in layers can be exported"
    )]
    Unnamed { path: PathBuf, name: String },
    /// A weight is out of the range of the requested dtype.
    #[error("`{name}` holds {value:e}, which is out of the range of {dtype}: use --dtype bf16 or f32")]
    Range { name: String, value: f32, dtype: &'static str },
    /// The repository name `given` does not have the form `owner/name`.
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
         HF_ENDPOINT, set HF_TOKEN for a repository that requires one, or download the files and name their \
         folder with --hf"
    )]
    Download { repo: String, revision: String, file: String, problem: String },
    /// A model's tokenizer failed.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The engine failed.
    #[error(transparent)]
    Shard(#[from] ShardError),
}

/// The differences between given weights and a model.
#[derive(Clone, Debug, Default)]
pub struct Mismatch {
    /// Weights that the model needs but that are not given.
    pub missing: Vec<String>,
    /// Given weights that the model does not have.
    pub unexpected: Vec<String>,
    /// Weights with a different shape; each entry includes both shapes.
    pub misshapen: Vec<String>,
}

impl Mismatch {
    /// Returns whether the model lacks weights, all of them of the layer of the head, which `--allow-missing` may drop.
    fn lacks_head_layer(&self) -> bool {
        let is_of_head = |name: &String| name.starts_with(HEAD_LAYER_PREFIX);
        !self.unexpected.is_empty() && self.unexpected.iter().all(is_of_head)
    }

    /// Returns whether there are no differences.
    pub fn is_empty(&self) -> bool {
        [&self.missing, &self.unexpected, &self.misshapen].into_iter().all(Vec::is_empty)
    }
}

impl std::fmt::Display for Mismatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Mismatch { missing, unexpected, misshapen } = self;
        let kinds = [("missing", missing), ("unexpected", unexpected), ("of another shape", misshapen)];
        let kinds = kinds.iter().filter(|(_, names)| !names.is_empty());
        let kinds: Vec<_> = kinds.map(|(kind, names)| format!("{kind} [{}]", first_of(names))).collect();
        f.write_str(&kinds.join(", "))
    }
}

/// Joins the names, omitting all but the first few.
fn first_of(names: &[String]) -> String {
    const SHOWN: usize = 8;
    let shown = names[..names.len().min(SHOWN)].join(", ");
    match names.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

impl CheckpointError {
    pub(crate) fn io(operation: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        move |source| CheckpointError::Io { operation, path: path.to_owned(), source }
    }

    /// Returns the error for a checkpoint file that cannot be read. A missing file means that the checkpoint is
    /// damaged.
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

    pub(crate) fn damaged_tensor(path: &Path, key: &str) -> Self {
        CheckpointError::damaged(path, format!("`{key}` does not match its checksum"))
    }

    pub(crate) fn damaged_weights(path: &Path, problem: impl std::fmt::Display) -> Self {
        CheckpointError::DamagedWeights { path: path.to_owned(), problem: problem.to_string() }
    }

    /// Reports whether the cause is the user's arguments or choice of model.
    pub fn is_usage(&self) -> bool {
        match self {
            CheckpointError::Data(error) => error.is_usage(),
            CheckpointError::DamagedButEarlier { .. }
            | CheckpointError::Io { .. }
            | CheckpointError::Damaged { .. }
            | CheckpointError::Slots { .. }
            | CheckpointError::NotFinite { .. }
            | CheckpointError::Context { .. }
            | CheckpointError::MissingParts { .. }
            | CheckpointError::NotHeld { .. }
            | CheckpointError::Stalled { .. }
            | CheckpointError::OtherRank
            | CheckpointError::Json { .. }
            | CheckpointError::DamagedWeights { .. }
            | CheckpointError::Range { .. }
            | CheckpointError::Download { .. }
            | CheckpointError::Shard(_) => false,
            _ => true,
        }
    }

    /// Reports whether the error is only a consequence of another rank's failure.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lists_of_names_are_truncated() {
        let names = |count: usize| (0..count).map(|name| name.to_string()).collect::<Vec<_>>();
        let mismatch = Mismatch { missing: names(2), misshapen: names(1), ..Mismatch::default() };
        assert_eq!(mismatch.to_string(), "missing [0, 1], of another shape [0]");
        let mismatch = Mismatch { unexpected: names(10), ..Mismatch::default() };
        assert_eq!(mismatch.to_string(), "unexpected [0, 1, 2, 3, 4, 5, 6, 7 and 2 more]");
    }
}
