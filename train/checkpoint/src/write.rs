//! Writes the parts of a checkpoint, and completes it from the parts of all writers.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::ffi::OsStr;
use std::fs::{self, DirEntry};
use std::io::{self, ErrorKind};
use std::iter;
use std::ops::Range;
use std::path::{Path, PathBuf};

use kiln_shard::{OwnedSlot, Owners, ParamGroupLayout, ParameterLayout};
use kiln_sys::durable::parent_of;
use kiln_sys::{Meter, StagingFolder, files};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::manifest::{
    Chunk, FORMAT_VERSION, FileEntry, Format, GroupEntry, MAX_MANIFEST, Manifest, TensorEntry, WIDTH,
    entry_of,
};
use super::origin::Saved;
use super::tensor_file::TensorFileWriter;
use super::weights::{Watched, Weights};
use super::{
    Architecture, CONFIG_FILE, CheckpointError, Checksum, MANIFEST_FILE, Result, SaveContext, folder,
};

/// The file of each weight of a full checkpoint, in the Hugging Face layout.
pub(super) const INDEX_FILE: &str = "model.safetensors.index.json";

pub(super) struct Entry {
    pub(super) group: usize,
    pub(super) slot: usize,
    pub(super) saved: Saved,
    pub(super) range: Range<usize>,
    /// Index of the first element among the values of the group of this kind, which are gathered together.
    pub(super) start: usize,
}

pub(super) trait Values {
    fn get(&mut self, layout: &[ParamGroupLayout], entry: &Entry) -> Result<Cow<'_, [f32]>>;

    /// Signals that these values are no longer needed.
    fn done(&mut self, _group: usize, _saved: &Saved) {}
}

/// Returns the groups and kinds of values for which `has` returns true, in the order of writing.
pub(super) fn kinds_of(
    format: Format,
    groups: usize,
    slots: Vec<Saved>,
    has: impl Fn(usize, &Saved) -> bool,
) -> Vec<(usize, Saved)> {
    let saved = iter::once(Saved::Weight).chain(slots);
    let kinds = saved.flat_map(|saved| (0..groups).map(move |group| (group, saved.clone())));
    let mut kinds: Vec<_> = kinds.filter(|(group, saved)| has(*group, saved)).collect();
    if format == Format::Full {
        kinds.sort_by_key(|(group, _)| *group);
    }
    kinds
}

pub(super) struct Part<'a> {
    pub(super) layout: &'a [ParamGroupLayout],
    pub(super) kinds: &'a [(usize, Saved)],
    /// Index of the chunk of every group to write; `None` writes whole groups.
    pub(super) chunk: Option<usize>,
    /// Owners of the parameters with owned slots.
    pub(super) owners: &'a Owners,
}

/// Returns the shape of the values `saved` of a parameter.
fn shape_of<'a>(parameter: &'a ParameterLayout, saved: &Saved) -> &'a [usize] {
    let owned = saved.slot().and_then(|slot| parameter.owned_slot(slot));
    owned.map_or(&parameter.shape, |slot| &slot.shape)
}

impl Part<'_> {
    /// Returns the name of the file for these values. Weights and optimizer slots have separate files.
    fn file_of(&self, (group, saved): &(usize, Saved)) -> String {
        let kind = if *saved == Saved::Weight { "model" } else { "optimizer" };
        match self.chunk {
            Some(index) => {
                let chunks = self.layout[*group].chunks;
                format!("{kind}-part-{:05}-of-{chunks:05}.safetensors", index + 1)
            }
            None => format!("{kind}-{:05}-of-{:05}.safetensors", group + 1, self.layout.len()),
        }
    }

    fn entries(&self, (group, saved): &(usize, Saved)) -> Vec<Entry> {
        let (group, layout) = (*group, &self.layout[*group]);
        let chunk = self.chunk.map(|index| layout.chunk_range(index));
        let owned = saved.slot().filter(|slot| layout.owns(slot));
        let mut end = 0;
        let entries = layout.parameters.iter().enumerate().map(|(slot, parameter)| {
            let (start, range) = if let Some(name) = owned {
                let start = end;
                end += parameter.owned_slot(name).map_or(0, OwnedSlot::numel);
                let is_mine = self.chunk.is_none() || self.chunk == self.owners.owner(group, slot);
                (start, if is_mine { 0..end - start } else { 0..0 })
            } else {
                let range = chunk.as_ref().map_or(0..parameter.numel(), |chunk| parameter.held_by(chunk).1);
                (parameter.offset + range.start, range)
            };
            Entry { group, slot, saved: saved.clone(), range, start }
        });
        entries.filter(|entry| !entry.range.is_empty()).collect()
    }

    pub(super) fn bytes(&self) -> u64 {
        let entries = self.kinds.iter().flat_map(|kind| self.entries(kind));
        entries.map(|entry| entry.range.len() as u64 * WIDTH).sum()
    }

    pub(super) fn write(&self, folder: &Path, values: &mut impl Values) -> Result<WriterOutput> {
        let mut output = WriterOutput::default();
        for kinds in self.kinds.chunk_by(|a, b| self.file_of(a) == self.file_of(b)) {
            let name = self.file_of(&kinds[0]);
            let array = |Entry { group, slot, saved, range, .. }| {
                let parameter = &self.layout[group].parameters[slot];
                let shape = shape_of(parameter, &saved);
                let whole = range.len() == shape.iter().product::<usize>();
                let shape = if whole { shape.to_vec() } else { vec![range.len()] };
                (saved.key(&parameter.name), shape)
            };
            let arrays: Vec<_> = kinds.iter().flat_map(|kind| self.entries(kind)).map(array).collect();
            let mut writer = TensorFileWriter::create(folder.join(&name), &arrays)?;
            for kind in kinds {
                for entry in self.entries(kind) {
                    let checksum = writer.append(&values.get(self.layout, &entry)?)?;
                    let Entry { group, slot, saved, range, .. } = entry;
                    let (offset, length) = (range.start as u64, range.len() as u64);
                    let chunk = Chunk { offset, length, file: name.clone(), checksum };
                    output.chunks.push(WrittenChunk { group, slot, saved, chunk });
                }
                values.done(kind.0, &kind.1);
            }
            output.files.insert(name, writer.finish()?);
        }
        Ok(output)
    }
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct WriterOutput {
    files: BTreeMap<String, FileEntry>,
    chunks: Vec<WrittenChunk>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct WrittenChunk {
    group: usize,
    slot: usize,
    saved: Saved,
    chunk: Chunk,
}

fn description(folder: &Path, index: usize) -> PathBuf {
    folder.join(format!("part-{index:05}.json"))
}

impl WriterOutput {
    /// Writes a description of this output to `folder`, for the rank that completes the checkpoint.
    pub(super) fn write_description(&self, folder: &Path, index: usize) -> Result<()> {
        let path = description(folder, index);
        let json = serde_json::to_vec(self).map_err(|error| CheckpointError::damaged(&path, error))?;
        // The rename makes the description appear only when it is complete.
        let partial = path.with_extension("partial");
        folder::write(&partial, &json)?;
        folder::rename(&partial, &path)
    }

    /// Reads writer `index`'s description in `folder`. Returns `None` until all files in it are fully visible.
    fn find(folder: &Path, index: usize) -> Result<Option<WriterOutput>> {
        let path = description(folder, index);
        let json = match files::read(&path, MAX_MANIFEST) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            other => other.map_err(CheckpointError::io("read", &path))?,
        };
        let output: WriterOutput =
            serde_json::from_slice(&json).map_err(|error| CheckpointError::damaged(&path, error))?;
        // Opening a file asks the server of a network file system; `stat` may be answered from a cache.
        let is_there = |(name, entry): (&String, &FileEntry)| {
            let found = files::open(&folder.join(name)).and_then(|file| file.metadata());
            found.is_ok_and(|found| found.len() == entry.bytes)
        };
        Ok(output.files.iter().all(is_there).then_some(output))
    }
}

/// Finds the outputs of `count` writers in `folder`. The inner error lists the missing writers. Opens only files in a
/// fresh listing: a network file system may cache for a long time that a file does not exist.
pub(super) fn find_outputs(folder: &Path, count: usize) -> Result<Result<Vec<WriterOutput>, Vec<usize>>> {
    let listed = fs::read_dir(folder).and_then(|entries| entries.collect::<io::Result<Vec<_>>>());
    let listed = listed.map_err(CheckpointError::io("read", folder))?;
    let names: HashSet<_> = listed.iter().map(DirEntry::file_name).collect();
    let is_listed = |index: &usize| {
        description(folder, *index).file_name().is_some_and(|name: &OsStr| names.contains(name))
    };
    let unlisted: Vec<_> = (0..count).filter(|index| !is_listed(index)).collect();
    if !unlisted.is_empty() {
        return Ok(Err(unlisted));
    }
    let (mut found, mut missing) = (Vec::new(), Vec::new());
    for index in 0..count {
        match WriterOutput::find(folder, index)? {
            Some(output) => found.push(output),
            None => missing.push(index),
        }
    }
    Ok(if missing.is_empty() { Ok(found) } else { Err(missing) })
}

pub(super) fn remove_descriptions(folder: &Path, count: usize) -> Result<()> {
    (0..count)
        .map(|index| description(folder, index))
        .try_for_each(|path| fs::remove_file(&path).map_err(CheckpointError::io("remove", &path)))
}

pub(super) struct Completion<'a> {
    pub(super) format: Format,
    pub(super) ranks: usize,
    pub(super) layout: &'a [ParamGroupLayout],
    pub(super) outputs: Vec<WriterOutput>,
    pub(super) context: &'a SaveContext,
}

impl Completion<'_> {
    /// Writes everything but the values. The manifest is written last: a folder with a manifest is complete.
    pub(super) fn complete(self, folder: &Path) -> Result<()> {
        let Completion { format, ranks, layout, outputs, context } = self;
        let tensors = tensors_of(layout, &outputs);
        let mut files: BTreeMap<_, _> = outputs.into_iter().flat_map(|output| output.files).collect();
        let index = (format == Format::Full).then(|| index_of(&tensors));
        let config = context.config.as_ref().map(|config| (CONFIG_FILE, config.as_bytes()));
        let others = context.files.iter().map(|(name, content)| (name.as_str(), &content[..]));
        let index = index.as_ref().map(|index| (INDEX_FILE, index.as_bytes()));
        for (name, content) in index.into_iter().chain(config).chain(others) {
            folder::write(&folder.join(name), content)?;
            files.insert(name.to_owned(), entry_of(content));
        }
        let groups = layout.iter();
        let unreadable = |error: toml::de::Error| CheckpointError::damaged(folder, error);
        let manifest = Manifest {
            format_version: FORMAT_VERSION,
            format,
            ranks,
            architecture: Architecture::from_model(&context.state.model),
            optimizer: context.optimizer.clone(),
            state: context.state.clone(),
            config: context.config.as_deref().map(toml::from_str).transpose().map_err(unreadable)?,
            base: context.base.clone(),
            checksums: Checksum::NAME.to_owned(),
            groups: groups
                .map(|group| GroupEntry { name: group.name.clone(), trainable: group.trainable })
                .collect(),
            files,
            tensors,
        };
        // Never write a checkpoint that could not be read again.
        manifest.check().map_err(|problem| CheckpointError::Context { problem })?;
        let path = folder.join(MANIFEST_FILE);
        let bytes = manifest.to_bytes().map_err(|error| CheckpointError::damaged(&path, error))?;
        folder::write(&path, &bytes)?;
        folder::sync_folder(folder)
    }
}

fn tensors_of(layout: &[ParamGroupLayout], outputs: &[WriterOutput]) -> Vec<TensorEntry> {
    let mut chunks: BTreeMap<(usize, usize, Saved), Vec<Chunk>> = BTreeMap::new();
    for written in outputs.iter().flat_map(|output| &output.chunks) {
        let key = (written.group, written.slot, written.saved.clone());
        chunks.entry(key).or_default().push(written.chunk.clone());
    }
    let tensor = |((group, slot, saved), mut chunks): ((usize, usize, Saved), Vec<Chunk>)| {
        chunks.sort_by_key(|chunk| chunk.offset);
        let parameter = &layout[group].parameters[slot];
        let (name, shape) = (parameter.name.clone(), shape_of(parameter, &saved).to_vec());
        TensorEntry { name, saved, group, dtype: "F32".to_owned(), shape, chunks }
    };
    chunks.into_iter().map(tensor).collect()
}

fn index_of(tensors: &[TensorEntry]) -> String {
    let weights = tensors.iter().filter(|tensor| tensor.saved == Saved::Weight);
    let total_size: u64 = weights.clone().map(|tensor| tensor.numel() * WIDTH).sum();
    let file = |tensor: &TensorEntry| Some((tensor.name.clone(), tensor.chunks.first()?.file.clone()));
    let weight_map: BTreeMap<_, _> = weights.filter_map(file).collect();
    format!("{:#}\n", json!({"metadata": {"total_size": total_size}, "weight_map": weight_map}))
}

/// A folder under construction, removed unless committed. Its unique name cannot collide with a user's files.
pub(super) struct NewFolder {
    place: PathBuf,
    staging: StagingFolder,
}

impl NewFolder {
    pub(super) fn create(place: &Path) -> Result<Self> {
        check_free(place)?;
        let parent = parent_of(place);
        fs::create_dir_all(parent).map_err(CheckpointError::io("create", parent))?;
        let staging = StagingFolder::create(place).map_err(CheckpointError::io("write next to", place))?;
        Ok(NewFolder { place: place.to_owned(), staging })
    }

    pub(super) fn path(&self) -> &Path {
        self.staging.path()
    }

    /// Moves the folder to its final place. Its files must already be on disk.
    pub(super) fn commit(self) -> Result<()> {
        folder::sync_folder(self.path())?;
        check_free(&self.place)?;
        folder::rename(self.path(), &self.place)?;
        self.staging.gone();
        folder::sync_folder(parent_of(&self.place))
    }
}

/// Fails if anything exists at `place`, even a dangling link.
pub fn check_free(place: &Path) -> Result<()> {
    match fs::symlink_metadata(place) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(CheckpointError::io("open", place)(error)),
        Ok(_) => Err(CheckpointError::Exists { path: place.to_owned() }),
    }
}

/// Writes a full checkpoint of external weights, without optimizer state, to the new folder `place`. Holds one
/// parameter in memory at a time. `layout`: the groups, whose parameters must all be among the weights. Fails if the
/// weights cannot be read or are not finite, or `place` exists.
pub(super) fn write_full(
    place: &Path,
    weights: &dyn Weights,
    layout: &[ParamGroupLayout],
    context: &SaveContext,
    meter: &Meter,
) -> Result<()> {
    let folder = NewFolder::create(place)?;
    let numel = weights.shapes().values().map(|shape| shape.iter().product::<usize>()).sum();
    let mut weights = Watched::new(weights, numel, meter);
    let kinds = &kinds_of(Format::Full, layout.len(), Vec::new(), |_, _| true);
    let owners = &Owners::new(layout, |_| false);
    let outputs = vec![Part { layout, kinds, chunk: None, owners }.write(folder.path(), &mut weights)?];
    weights.check()?;
    Completion { format: Format::Full, ranks: 1, layout, outputs, context }.complete(folder.path())?;
    folder.commit()
}

impl Values for Watched<'_> {
    fn get(&mut self, layout: &[ParamGroupLayout], entry: &Entry) -> Result<Cow<'_, [f32]>> {
        let mut values = vec![0.0; entry.range.len()];
        self.read(&layout[entry.group].parameters[entry.slot].name, entry.range.clone(), &mut values)?;
        Ok(values.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Ones;

    impl Values for Ones {
        fn get(&mut self, _: &[ParamGroupLayout], entry: &Entry) -> Result<Cow<'_, [f32]>> {
            Ok(vec![1.0; entry.range.len()].into())
        }
    }

    #[test]
    fn parts_are_found_when_their_files_are_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let parameters = vec![("a".to_owned(), vec![300]), ("b".to_owned(), vec![300])];
        let layout = [ParamGroupLayout::new("unit".to_owned(), true, parameters, 2)];
        let missing = || match find_outputs(path, 2).unwrap() {
            Ok(outputs) => {
                assert_eq!(outputs.len(), 2);
                Vec::new()
            }
            Err(missing) => missing,
        };
        assert_eq!(missing(), [0, 1]);
        for index in [1, 0] {
            let owners = &Owners::new(&layout, |_| false);
            let part = Part { layout: &layout, kinds: &[(0, Saved::Weight)], chunk: Some(index), owners };
            part.write(path, &mut Ones).unwrap().write_description(path, index).unwrap();
            assert_eq!(missing(), if index == 1 { vec![0] } else { vec![] });
        }
        // The description is visible, but its data file is missing or incomplete.
        let data = path.join("model-part-00002-of-00002.safetensors");
        let bytes = fs::read(&data).unwrap();
        fs::remove_file(&data).unwrap();
        assert_eq!(missing(), [1]);
        fs::write(&data, &bytes[..bytes.len() - 1]).unwrap();
        assert_eq!(missing(), [1]);
        fs::write(&data, &bytes).unwrap();
        assert_eq!(missing(), [0; 0]);
        remove_descriptions(path, 2).unwrap();
        assert_eq!(missing(), [0, 1]);
    }
}
