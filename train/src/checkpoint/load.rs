//! Finding and reading checkpoints.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use kiln_model::ModelConfig;
use kiln_shard::{Engine, Kind, UnitLayout};
use memmap2::Mmap;
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;
use serde::Deserialize;

use super::{
    CHECKPOINTS, CheckpointError, CheckpointState, FIRST_MOMENT, FORMAT_VERSION, INDEX_FILE,
    LATEST_FILE, SECOND_MOMENT, STATE_FILE, TOKENIZER_FILE, list, optimizer_file,
};

/// A complete checkpoint on disk.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    state: CheckpointState,
}

#[derive(Deserialize)]
#[serde(expecting = "an object with the key `weight_map`")]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Opens a checkpoint folder; the folder of all checkpoints of a run and the run folder itself
    /// stand for the newest one in them.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let folders = [path.to_owned(), path.join(CHECKPOINTS)];
        let folder = if path.join(STATE_FILE).exists() {
            Some(path.to_owned())
        } else {
            folders.iter().find_map(|folder| newest(folder))
        };
        let folder = folder.ok_or_else(|| CheckpointError::NotFound {
            path: path.to_owned(),
            hint: "name a folder that holds state.json, or a run folder with a checkpoint in it",
        })?;
        let state = read_state(&folder.join(STATE_FILE))?;
        Ok(Checkpoint { folder, state })
    }

    /// Opens the newest checkpoint of the run in `out`.
    pub fn latest(out: &Path) -> Result<Self, CheckpointError> {
        let folder = super::folder_of_run(out);
        if newest(&folder).is_none() {
            return Err(CheckpointError::NotFound {
                path: folder,
                hint: "start a new run without --resume, or name the run folder with --out",
            });
        }
        Checkpoint::open(&folder)
    }

    /// Whether the run in `out` has a complete checkpoint.
    pub fn is_in(out: &Path) -> bool {
        newest(&super::folder_of_run(out)).is_some()
    }

    /// Where the run stood.
    pub fn state(&self) -> &CheckpointState {
        &self.state
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The tokenizer's file.
    pub fn tokenizer(&self) -> PathBuf {
        self.folder.join(TOKENIZER_FILE)
    }

    /// Fails if the saved model is not of the shape of `model`. Says so before any work starts, and
    /// also where the weights would fit but mean something else, as with another number of heads.
    pub fn check_model(&self, model: &ModelConfig) -> Result<(), CheckpointError> {
        let saved = &self.state.model;
        let sizes = [
            ("vocab_size", saved.vocab_size, model.vocab_size),
            ("d_model", saved.d_model, model.d_model),
            ("layers", saved.layers, model.layers),
            ("heads", saved.heads, model.heads),
            ("kv_heads", saved.kv_heads, model.kv_heads),
            ("d_ff", saved.d_ff, model.d_ff),
        ];
        let mut differences: Vec<_> = sizes
            .into_iter()
            .filter(|(_, saved, here)| saved != here)
            .map(|(key, saved, here)| format!("model.{key} is {saved} there and {here} here"))
            .collect();
        if saved.tie_embeddings != model.tie_embeddings {
            let (saved, here) = (saved.tie_embeddings, model.tie_embeddings);
            differences.push(format!("model.tie_embeddings is {saved} there and {here} here"));
        }
        if saved.feed_forward != model.feed_forward {
            differences.push("model.feed_forward differs".to_owned());
        }
        if differences.is_empty() {
            return Ok(());
        }
        Err(CheckpointError::OtherModel { path: self.folder.clone(), differences })
    }

    /// Loads this rank's part of all weights. Names and shapes must agree exactly.
    pub fn load_weights(&self, engine: &Engine) -> Result<(), CheckpointError> {
        let index_path = self.folder.join(INDEX_FILE);
        let text = fs::read(&index_path).map_err(CheckpointError::unreadable(&index_path))?;
        let index: Index = serde_json::from_slice(&text)
            .map_err(|error| CheckpointError::damaged(&index_path, error))?;
        self.compare_names(engine, &index)?;
        for unit in &engine.layout().units {
            let files: BTreeSet<_> =
                unit.parameters.iter().map(|p| &index.weight_map[&p.name]).collect();
            for name in files {
                let path = self.inside(&index_path, name)?;
                let parameters = |parameter: &str| &index.weight_map[parameter] == name;
                load_file(engine, &path, unit, parameters, &[("", Kind::Weight)])?;
            }
        }
        Ok(())
    }

    /// Loads this rank's part of the optimizer's moments.
    pub fn load_optimizer(&self, engine: &Engine) -> Result<(), CheckpointError> {
        // Before the first update there are none.
        if self.state.step == self.state.skipped {
            return Ok(());
        }
        let kinds = [(FIRST_MOMENT, Kind::FirstMoment), (SECOND_MOMENT, Kind::SecondMoment)];
        let units = engine.layout().units.len();
        for (position, unit) in engine.layout().units.iter().enumerate() {
            if unit.trainable {
                let path = self.folder.join(optimizer_file(position, units));
                load_file(engine, &path, unit, |_| true, &kinds)?;
            }
        }
        Ok(())
    }

    fn compare_names(&self, engine: &Engine, index: &Index) -> Result<(), CheckpointError> {
        let names: BTreeSet<_> =
            engine.layout().parameters().map(|(_, parameter)| parameter.name.as_str()).collect();
        let saved: BTreeSet<_> = index.weight_map.keys().map(String::as_str).collect();
        let difference = |a: &BTreeSet<&str>, b: &BTreeSet<&str>| -> Vec<String> {
            a.difference(b).map(|name| (*name).to_owned()).collect()
        };
        let (missing, unexpected) = (difference(&names, &saved), difference(&saved, &names));
        if missing.is_empty() && unexpected.is_empty() {
            return Ok(());
        }
        Err(CheckpointError::Names { path: self.folder.clone(), missing, unexpected })
    }

    /// A file of this folder; the index must not point anywhere else.
    fn inside(&self, index: &Path, name: &str) -> Result<PathBuf, CheckpointError> {
        let plain = Path::new(name).file_name().is_some_and(|file| file == name);
        if !plain {
            return Err(CheckpointError::damaged(index, format!("`{name}` is not a file name")));
        }
        Ok(self.folder.join(name))
    }
}

/// The checkpoint that `latest` names, or else the one of the highest step.
fn newest(folder: &Path) -> Option<PathBuf> {
    let named = fs::read_to_string(folder.join(LATEST_FILE)).ok();
    named
        .map(|name| folder.join(name.trim()))
        .filter(|path| path.join(STATE_FILE).exists())
        .or_else(|| list(folder).pop().map(|(_, path)| path))
}

fn read_state(path: &Path) -> Result<CheckpointState, CheckpointError> {
    #[derive(Deserialize)]
    #[serde(expecting = "an object with the key `format_version`")]
    struct Version {
        format_version: u64,
    }
    let text = fs::read(path).map_err(CheckpointError::io("read", path))?;
    let damaged = |error: serde_json::Error| CheckpointError::damaged(path, error);
    let Version { format_version } = serde_json::from_slice(&text).map_err(damaged)?;
    if format_version != FORMAT_VERSION {
        let problem = format!("format version {format_version}, this build reads {FORMAT_VERSION}");
        return Err(CheckpointError::damaged(path, problem));
    }
    serde_json::from_slice(&text).map_err(damaged)
}

/// Loads those parameters of `unit` that `wanted` accepts, under each (suffix, kind).
fn load_file(
    engine: &Engine,
    path: &Path,
    unit: &UnitLayout,
    wanted: impl Fn(&str) -> bool,
    kinds: &[(&str, Kind)],
) -> Result<(), CheckpointError> {
    let file = File::open(path).map_err(CheckpointError::unreadable(path))?;
    // SAFETY: checkpoints are written beside their place and renamed, never changed in place; a
    // file that someone truncates while it is mapped is outside what this can guard against.
    let map = unsafe { Mmap::map(&file) }.map_err(CheckpointError::io("map", path))?;
    let tensors =
        SafeTensors::deserialize(&map).map_err(|error| CheckpointError::damaged(path, error))?;
    for parameter in unit.parameters.iter().filter(|parameter| wanted(&parameter.name)) {
        for (suffix, kind) in kinds {
            let name = format!("{}{suffix}", parameter.name);
            let tensor =
                tensors.tensor(&name).map_err(|error| CheckpointError::damaged(path, error))?;
            if tensor.shape() != parameter.shape {
                return Err(CheckpointError::Shape {
                    path: path.to_owned(),
                    name,
                    found: tensor.shape().to_vec(),
                    expected: parameter.shape.clone(),
                });
            }
            if tensor.dtype() != Dtype::F32 {
                let problem = format!("`{name}` is {:?}, expected F32", tensor.dtype());
                return Err(CheckpointError::damaged(path, problem));
            }
            let values = floats(tensor.data());
            engine.load_parameter(&parameter.name, *kind, &values)?;
        }
    }
    Ok(())
}

/// Little-endian f32 values, without a copy where alignment and byte order allow.
fn floats(bytes: &[u8]) -> std::borrow::Cow<'_, [f32]> {
    match bytemuck::try_cast_slice(bytes) {
        Ok(values) if cfg!(target_endian = "little") => values.into(),
        _ => bytes
            .chunks_exact(size_of::<f32>())
            .map(|chunk| f32::from_le_bytes([chunk[0], chunk[1], chunk[2], chunk[3]]))
            .collect::<Vec<_>>()
            .into(),
    }
}
