use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_model::{Decoder, Layers, ModelConfig};

use super::folder::{self, checkpoints_folder, newest};
use super::manifest::check_plain_file;
use super::origin::Saved;
use super::{
    CONFIG_FILE, CheckpointError, CheckpointState, MANIFEST_FILE, Manifest, Result, SavedOptimizer,
    TOKENIZER_FILE,
};

/// A complete checkpoint on disk.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    manifest: Arc<Manifest>,
}

impl Checkpoint {
    /// Returns the checkpoint folder for `path`: itself, or the newest checkpoint of a run folder or checkpoints
    /// folder.
    pub fn find(path: &Path) -> Result<PathBuf> {
        if folder::is_complete(path) {
            return Ok(path.to_owned());
        }
        let folders = [path.to_owned(), checkpoints_folder(path)];
        folders.iter().find_map(|folder| newest(folder)).ok_or_else(|| {
            // The path is too long, or its parent folder is inaccessible.
            if let Err(error) = path.try_exists()
                && error.kind() != ErrorKind::NotADirectory
            {
                return CheckpointError::io("open", path)(error);
            }
            let hint = "name a folder that holds manifest.json, or a run folder with a checkpoint in it";
            let found = folders.iter().map(|folder| folder::unusable(folder));
            let mut found = found.into_iter().find(|found| !found.is_empty()).unwrap_or_default();
            if found.is_empty()
                && let Err(error) = folder::has_manifest(path)
            {
                found.push((path.to_owned(), folder::cannot_read(&error)));
            }
            none_in(path, found, hint)
        })
    }

    /// Opens the checkpoint that [`Checkpoint::find`] returns for `path`. Reads no weights.
    pub fn open(path: &Path) -> Result<Self> {
        let folder = Checkpoint::find(path)?;
        let is_usable = |folder: &Path| Checkpoint::open_at(folder).is_ok();
        Checkpoint::open_at(&folder).map_err(|error| match folder::earlier(&folder, is_usable) {
            Some(earlier) if matches!(error, CheckpointError::Damaged { .. }) => {
                CheckpointError::DamagedButEarlier { source: Box::new(error), earlier }
            }
            _ => error,
        })
    }

    fn open_at(folder: &Path) -> Result<Self> {
        let checkpoint =
            Checkpoint { folder: folder.to_owned(), manifest: Arc::new(Manifest::read(folder)?) };
        checkpoint.manifest.check_sizes().map_err(|problem| checkpoint.wrong_manifest(problem))?;
        // Other code reads these files without checking their checksums.
        let files = checkpoint.manifest.files.iter();
        for (name, entry) in files.filter(|(_, entry)| entry.covered == entry.bytes) {
            check_plain_file(folder, name, entry)?;
        }
        Ok(checkpoint)
    }

    fn wrong_manifest(&self, problem: String) -> CheckpointError {
        CheckpointError::damaged(&self.folder.join(MANIFEST_FILE), problem)
    }

    /// Fails unless the model built from `layers` has as many weights as the checkpoint and `base`, the model that its
    /// adapters change, and the weight files have the expected lengths. Must be called before memory is allocated for the
    /// weights.
    pub(crate) fn check_weights_are_there(&self, layers: &Layers, base: Option<&ModelConfig>) -> Result<()> {
        let expected = Decoder::count_parameters(layers, &self.manifest.state.model)? as u64;
        let of_base = base.map_or(Ok(0), |base| Decoder::count_parameters(layers, base))? as u64;
        let found = self.manifest.num_parameters() + of_base;
        if expected != found {
            let problem = format!("a model of {expected} parameters, and weights of {found}");
            return Err(self.wrong_manifest(problem));
        }
        self.check_lengths(|saved| *saved == Saved::Weight)
    }

    /// Fails unless the files of weights and optimizer state have the lengths in the manifest.
    pub fn check_files_are_there(&self) -> Result<()> {
        self.check_lengths(|_| true)
    }

    fn check_lengths(&self, wanted: impl Fn(&Saved) -> bool) -> Result<()> {
        let tensors = self.manifest.tensors.iter().filter(|tensor| wanted(&tensor.saved));
        let names: BTreeSet<_> =
            tensors.flat_map(|tensor| &tensor.chunks).map(|chunk| chunk.file.as_str()).collect();
        names.into_iter().try_for_each(|name| {
            let (path, expected) = (self.folder.join(name), self.manifest.files[name].bytes);
            let found = fs::metadata(&path).map_err(CheckpointError::unreadable(&path))?.len();
            if found == expected {
                return Ok(());
            }
            let problem = format!("it has {found} bytes, and should have {expected}");
            Err(CheckpointError::damaged(&path, problem))
        })
    }

    /// Returns the folder of the newest checkpoint of the run in `out`.
    pub fn find_latest(out: &Path) -> Result<PathBuf> {
        let folder = checkpoints_folder(out);
        newest(&folder).ok_or_else(|| {
            let hint = "start a new run without --resume, or name the run folder with --out";
            none_in(&folder, folder::unusable(&folder), hint)
        })
    }

    /// Reports whether the run in `out` has a complete checkpoint, even an unreadable one.
    pub fn is_in(out: &Path) -> bool {
        folder::has_any(&checkpoints_folder(out))
    }

    /// Returns the checkpoint's manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Fails unless the checkpoint was trained with the optimizer `here`.
    pub fn require_optimizer(&self, here: &SavedOptimizer) -> Result<()> {
        let saved = &self.manifest.optimizer;
        if saved.is(here) {
            return Ok(());
        }
        let (saved, here) = (Box::new(saved.clone()), Box::new(here.clone()));
        Err(CheckpointError::OtherOptimizer { path: self.folder.clone(), saved, here })
    }

    /// Returns the position of the run.
    pub fn state(&self) -> &CheckpointState {
        &self.manifest.state
    }

    /// Returns the checkpoint's folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the path of the tokenizer file.
    pub fn tokenizer(&self) -> PathBuf {
        self.folder.join(TOKENIZER_FILE)
    }

    /// Returns the path of the run's configuration, if the checkpoint has one.
    pub fn config(&self) -> Option<PathBuf> {
        Some(self.folder.join(CONFIG_FILE)).filter(|path| path.exists())
    }

    /// Returns the longest sequence, in tokens, that the model supports.
    pub fn context_length(&self) -> usize {
        self.manifest.state.context_length
    }

    /// Returns the sequence length, in tokens, in training, or else the model's context length.
    pub fn seq_len(&self) -> usize {
        self.size_in_config("data", "seq_len").unwrap_or_else(|| self.context_length())
    }

    /// Returns the context length that the initial model specified, if any.
    pub fn given_context(&self) -> Option<usize> {
        self.size_in_config("model", "context_length")
    }

    fn size_in_config(&self, section: &str, key: &str) -> Option<usize> {
        let size = self.manifest.config.as_ref()?.get(section)?.get(key)?.as_u64()?;
        usize::try_from(size).ok().filter(|size| *size > 0)
    }
}

fn none_in(path: &Path, found: Vec<(PathBuf, String)>, hint: &'static str) -> CheckpointError {
    let path = path.to_owned();
    match found.is_empty() {
        true => CheckpointError::NotFound { path, hint },
        false => CheckpointError::NoneUsable { path, found },
    }
}
