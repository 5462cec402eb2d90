use std::path::{Path, PathBuf};

use crate::error::DiffError;
use kiln_checkpoint::hugging_face::{AdapterFolder, HuggingFaceFolder};
use kiln_checkpoint::{self as checkpoint, Checkpoint, MANIFEST_FILE};
use kiln_train::run::HASHES_FILE;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subject {
    pub path: PathBuf,
    pub kind: SubjectKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SubjectKind {
    Run,
    Hashes,
    Metrics,
    Config,
    Checkpoint,
    HuggingFace,
    Data,
}

impl SubjectKind {
    fn name(self) -> &'static str {
        match self {
            SubjectKind::Run => "a run folder",
            SubjectKind::Hashes => "a file of hashes",
            SubjectKind::Metrics => "a file of metrics",
            SubjectKind::Config => "a configuration",
            SubjectKind::Checkpoint => "a checkpoint",
            SubjectKind::HuggingFace => "a model in the layout of Hugging Face",
            SubjectKind::Data => "prepared data",
        }
    }
}

impl Subject {
    /// Determines what `path` refers to.
    pub fn find(path: &Path) -> Result<Self, DiffError> {
        let kind = kind_of(path).ok_or_else(|| match path.exists() {
            false => DiffError::Missing { path: path.to_owned() },
            true => DiffError::Unknown { path: path.to_owned() },
        })?;
        Ok(Subject { path: path.to_owned(), kind })
    }

    pub fn describe(&self) -> String {
        format!("{} is {}", self.path.display(), self.kind.name())
    }

    pub fn hashes(&self) -> Option<PathBuf> {
        self.file(HASHES_FILE, SubjectKind::Hashes)
    }

    pub fn metrics(&self) -> Option<PathBuf> {
        self.file("metrics.jsonl", SubjectKind::Metrics)
    }

    fn file(&self, name: &str, own: SubjectKind) -> Option<PathBuf> {
        match self.kind {
            SubjectKind::Run => Some(self.path.join(name)).filter(|path| path.is_file()),
            kind => (kind == own).then(|| self.path.clone()),
        }
    }

    pub fn config(&self) -> Option<PathBuf> {
        match self.kind {
            SubjectKind::Config => Some(self.path.clone()),
            SubjectKind::Run | SubjectKind::Checkpoint => {
                Some(self.path.join("config.toml")).filter(|path| path.is_file())
            }
            _ => None,
        }
    }

    /// Returns the path of the model: for a run, its newest checkpoint.
    pub fn model(&self) -> Option<PathBuf> {
        match self.kind {
            SubjectKind::Checkpoint | SubjectKind::HuggingFace => Some(self.path.clone()),
            SubjectKind::Run => Checkpoint::find(&self.path).ok(),
            _ => None,
        }
    }
}

/// Returns the models to compare, of a common step if any; `None` if two runs share no step, or one has no model.
pub fn models_of(a: &Subject, b: &Subject) -> Option<(PathBuf, PathBuf)> {
    let (newest_a, newest_b) = (a.model()?, b.model()?);
    let of_step = |subject: &Subject, other: &Path| {
        let step = checkpoint::step_of(other.file_name()?)?;
        let place = checkpoint::checkpoint_path(&checkpoint::checkpoints_folder(&subject.path), step);
        (subject.kind == SubjectKind::Run && place.join(MANIFEST_FILE).is_file()).then_some(place)
    };
    if let Some(model) = of_step(b, &newest_a) {
        return Some((newest_a, model));
    }
    if let Some(model) = of_step(a, &newest_b) {
        return Some((model, newest_b));
    }
    // The weights of two runs without a common step differ even if nothing is wrong.
    let are_runs = [a, b].iter().all(|subject| subject.kind == SubjectKind::Run);
    (!are_runs).then_some((newest_a, newest_b))
}

fn kind_of(path: &Path) -> Option<SubjectKind> {
    let has = |name: &str| path.join(name).exists();
    if path.is_file() {
        return match path.extension()?.to_str()? {
            "toml" => Some(SubjectKind::Config),
            // File names of hashes always contain the word.
            "jsonl" if path.file_name()?.to_str()?.contains("hashes") => Some(SubjectKind::Hashes),
            "jsonl" => Some(SubjectKind::Metrics),
            _ => None,
        };
    }
    match () {
        () if has("data.json") => Some(SubjectKind::Data),
        () if has(MANIFEST_FILE) => Some(SubjectKind::Checkpoint),
        () if HuggingFaceFolder::is_one(path) || AdapterFolder::is_one(path) => {
            Some(SubjectKind::HuggingFace)
        }
        () if has("config.toml") || has("metrics.jsonl") || has(HASHES_FILE) => Some(SubjectKind::Run),
        () => Checkpoint::find(path).is_ok().then_some(SubjectKind::Checkpoint),
    }
}
