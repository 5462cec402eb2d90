//! Writing full checkpoints, unit by unit.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use kiln_collectives::Buffer;
use kiln_shard::{Engine, Kind, UnitLayout};
use safetensors::tensor::{Dtype, TensorView};
use serde::Serialize;

use super::{
    CheckpointError, CheckpointState, FIRST_MOMENT, INDEX_FILE, LATEST_FILE, SECOND_MOMENT,
    STATE_FILE, TOKENIZER_FILE, folder_name, list, model_file, optimizer_file,
};

/// What goes into a checkpoint besides the engine's values.
pub struct SaveContext<'a> {
    /// Where the run stands.
    pub state: &'a CheckpointState,
    /// The resolved configuration, as TOML.
    pub config: &'a str,
    /// The tokenizer's file.
    pub tokenizer: &'a Path,
}

/// Writes the checkpoints of a run into one folder and removes old ones.
pub struct CheckpointWriter {
    folder: PathBuf,
    keep: usize,
}

/// `model.safetensors.index.json`, in the layout of Hugging Face.
#[derive(Serialize)]
struct Index {
    metadata: IndexMetadata,
    weight_map: BTreeMap<String, String>,
}

#[derive(Serialize)]
struct IndexMetadata {
    total_size: usize,
}

impl CheckpointWriter {
    /// Writes to `folder` and keeps the newest `keep` checkpoints, or all if it is 0.
    pub fn new(folder: PathBuf, keep: usize) -> Self {
        CheckpointWriter { folder, keep }
    }

    /// Gathers every unit to rank 0, which writes it; holds one unit in memory at a time. Returns
    /// the folder. Collective: on failure of rank 0 every rank gets an error.
    pub fn save(
        &self,
        engine: &Engine,
        context: &SaveContext<'_>,
    ) -> Result<PathBuf, CheckpointError> {
        let place = self.folder.join(folder_name(context.state.step));
        let beside = self.folder.join(format!(".{}.partial", folder_name(context.state.step)));
        let writes = engine.world().rank() == 0;
        let mut outcome = if writes { begin(&beside) } else { Ok(()) };
        let units = engine.layout().units.len();
        for (position, unit) in engine.layout().units.iter().enumerate() {
            // Every rank takes part in every gather, whatever rank 0 has met so far.
            let weights = engine.gather_unit(position, Kind::Weight)?;
            let first = engine.gather_unit(position, Kind::FirstMoment)?;
            let second = engine.gather_unit(position, Kind::SecondMoment)?;
            if writes && outcome.is_ok() {
                outcome =
                    write_unit(&beside.join(model_file(position, units)), unit, &[("", &weights)])
                        .and_then(|()| {
                            let moments = [(FIRST_MOMENT, &first), (SECOND_MOMENT, &second)];
                            write_unit(
                                &beside.join(optimizer_file(position, units)),
                                unit,
                                &moments,
                            )
                        });
            }
        }
        if writes {
            outcome = outcome.and_then(|()| self.complete(engine, context, &beside, &place));
        }
        let failed = engine.sum_over_ranks("save", &[f64::from(u8::from(outcome.is_err()))])?;
        outcome?;
        if failed.iter().sum::<f64>() > 0.0 { Err(CheckpointError::Rank0) } else { Ok(place) }
    }

    fn complete(
        &self,
        engine: &Engine,
        context: &SaveContext<'_>,
        beside: &Path,
        place: &Path,
    ) -> Result<(), CheckpointError> {
        let units = engine.layout().units.len();
        let mut index = Index {
            metadata: IndexMetadata {
                total_size: engine.layout().num_parameters() * size_of::<f32>(),
            },
            weight_map: BTreeMap::new(),
        };
        for (position, unit) in engine.layout().units.iter().enumerate() {
            for parameter in &unit.parameters {
                index.weight_map.insert(parameter.name.clone(), model_file(position, units));
            }
        }
        write_json(&beside.join(INDEX_FILE), &index)?;
        write(&beside.join("config.toml"), context.config.as_bytes())?;
        let tokenizer =
            fs::read(context.tokenizer).map_err(CheckpointError::io("read", context.tokenizer))?;
        write(&beside.join(TOKENIZER_FILE), &tokenizer)?;
        // Last: a folder with a state is complete.
        write_json(&beside.join(STATE_FILE), context.state)?;
        sync_folder(beside)?;
        replace(beside, place)?;
        self.point_to(context.state.step)?;
        self.remove_old(context.state.step);
        Ok(())
    }

    fn point_to(&self, step: u64) -> Result<(), CheckpointError> {
        let beside = self.folder.join(".latest.partial");
        write(&beside, folder_name(step).as_bytes())?;
        replace(&beside, &self.folder.join(LATEST_FILE))?;
        sync_folder(&self.folder)
    }

    /// Removes all but the newest checkpoints, of which the one of `step` has just been written:
    /// those of later steps are of a run that went back and now goes on from an earlier one. One
    /// that cannot be removed is no reason to stop.
    fn remove_old(&self, step: u64) {
        if self.keep == 0 {
            return;
        }
        let mut checkpoints = list(&self.folder);
        checkpoints.sort_by_key(|(saved, _)| (*saved <= step, *saved));
        let surplus = checkpoints.len().saturating_sub(self.keep);
        for (_, path) in checkpoints.drain(..surplus) {
            if let Err(error) = fs::remove_dir_all(&path) {
                tracing::warn!(path = %path.display(), %error, "cannot remove an old checkpoint");
            }
        }
    }
}

fn begin(beside: &Path) -> Result<(), CheckpointError> {
    // What an interrupted save has left behind.
    if beside.exists() {
        fs::remove_dir_all(beside).map_err(CheckpointError::io("remove", beside))?;
    }
    fs::create_dir_all(beside).map_err(CheckpointError::io("create", beside))
}

/// Writes the parameters of one unit, once for every (suffix, values) that has values.
fn write_unit(
    path: &Path,
    unit: &UnitLayout,
    kinds: &[(&str, &Option<Buffer>)],
) -> Result<(), CheckpointError> {
    let mut tensors = Vec::new();
    for (suffix, values) in kinds {
        let Some(values) = values else { continue };
        for parameter in &unit.parameters {
            let range = parameter.range();
            let width = size_of::<f32>();
            let bytes = &values.as_bytes()[range.start * width..range.end * width];
            let view = TensorView::new(Dtype::F32, parameter.shape.clone(), bytes)
                .map_err(|error| CheckpointError::damaged(path, error))?;
            tensors.push((format!("{}{suffix}", parameter.name), view));
        }
    }
    safetensors::serialize_to_file(tensors, None, path).map_err(|error| CheckpointError::Io {
        operation: "write",
        path: path.to_owned(),
        source: std::io::Error::other(error.to_string()),
    })?;
    sync_file(path)
}

fn write_json(path: &Path, value: &impl Serialize) -> Result<(), CheckpointError> {
    let mut text = serde_json::to_string_pretty(value)
        .map_err(|error| CheckpointError::damaged(path, error))?;
    text.push('\n');
    write(path, text.as_bytes())
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), CheckpointError> {
    let mut file = File::create(path).map_err(CheckpointError::io("create", path))?;
    file.write_all(bytes).map_err(CheckpointError::io("write", path))?;
    file.sync_all().map_err(CheckpointError::io("sync", path))
}

fn sync_file(path: &Path) -> Result<(), CheckpointError> {
    File::open(path).and_then(|file| file.sync_all()).map_err(CheckpointError::io("sync", path))
}

/// A rename is durable once its folder is synced.
fn sync_folder(path: &Path) -> Result<(), CheckpointError> {
    sync_file(path)
}

/// Puts `beside` in the place of `place`. A folder in its place is moved aside first, so that a
/// complete one exists at every moment.
fn replace(beside: &Path, place: &Path) -> Result<(), CheckpointError> {
    let rename =
        |from: &Path, to: &Path| fs::rename(from, to).map_err(CheckpointError::io("rename to", to));
    if !place.is_dir() {
        return rename(beside, place);
    }
    let old = beside.with_extension("old");
    if old.exists() {
        fs::remove_dir_all(&old).map_err(CheckpointError::io("remove", &old))?;
    }
    rename(place, &old)?;
    rename(beside, place)?;
    fs::remove_dir_all(&old).map_err(CheckpointError::io("remove", &old))
}
