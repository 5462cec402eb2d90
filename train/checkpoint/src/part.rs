//! The output of one writer, and the completion of a checkpoint from all parts.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::ffi::OsStr;
use std::fs::{self, DirEntry};
use std::io::{self, ErrorKind};
use std::iter;
use std::ops::Range;
use std::path::{Path, PathBuf};

use kiln_shard::ParamGroupLayout;
use kiln_sys::StagingFolder;
use kiln_sys::durable::parent_of;
use kiln_sys::files;
use serde::{Deserialize, Serialize};

use super::index::write_index;
use super::manifest::{
    Chunk, FORMAT_VERSION, FileEntry, Format, GroupEntry, MAX_MANIFEST, Manifest, TensorEntry, entry_of,
};
use super::saved::Saved;
use super::tensor_file::TensorFileWriter;
use super::{Architecture, CONFIG_FILE, CheckpointError, Checksum, Result, SaveContext, disk, folder};

/// Elements of one parameter to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) group: usize,
    pub(super) slot: usize,
    pub(super) saved: Saved,
    /// Elements of the flat parameter.
    pub(super) range: Range<usize>,
}

/// The output of one writer.
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

/// A file that is being written, entry by entry.
pub(super) struct PartFile {
    name: String,
    writer: TensorFileWriter,
    entries: std::vec::IntoIter<Entry>,
    chunks: Vec<WrittenChunk>,
}

impl PartFile {
    /// Creates `name` in `folder` for `entries`, whose values must be written in this order.
    pub(super) fn create(
        folder: &Path,
        name: String,
        layout: &[ParamGroupLayout],
        entries: Vec<Entry>,
    ) -> Result<Self> {
        let arrays: Vec<_> = entries
            .iter()
            .map(|entry| {
                let parameter = &layout[entry.group].parameters[entry.slot];
                let whole = entry.range.len() == parameter.numel();
                let shape = if whole { parameter.shape.clone() } else { vec![entry.range.len()] };
                (entry.saved.key(&parameter.name), shape)
            })
            .collect();
        let writer = TensorFileWriter::create(folder.join(&name), &arrays)?;
        Ok(PartFile { name, writer, entries: entries.into_iter(), chunks: Vec::new() })
    }

    /// Writes the values of the next entry.
    pub(super) fn put(&mut self, values: &[f32]) -> Result<()> {
        let checksum = self.writer.append(values)?;
        if let Some(Entry { group, slot, saved, range }) = self.entries.next() {
            let (offset, length) = (range.start as u64, range.len() as u64);
            let chunk = Chunk { offset, length, file: self.name.clone(), checksum };
            self.chunks.push(WrittenChunk { group, slot, saved, chunk });
        }
        Ok(())
    }

    /// Waits until the file is on the disk, and adds it to `part`.
    pub(super) fn finish(self, part: &mut WriterOutput) -> Result<()> {
        part.files.insert(self.name, self.writer.finish()?);
        part.chunks.extend(self.chunks);
        Ok(())
    }
}

/// The source of the values of a sharded part.
pub(super) trait Values {
    /// Returns whether there are values of this kind of a group.
    fn has(&self, group: usize, saved: &Saved) -> bool;

    /// Returns the values of an entry.
    fn get(&self, layout: &[ParamGroupLayout], entry: &Entry) -> Result<Cow<'_, [f32]>>;

    /// Reports that no more of these values are needed.
    fn done(&mut self, _unit: usize, _saved: &Saved) {}
}

/// Returns the bytes of the values that [`write_chunk`] writes.
pub(super) fn bytes_of_chunk(
    layout: &[ParamGroupLayout],
    index: usize,
    slots: &[Saved],
    values: &impl Values,
) -> u64 {
    let of_group = |(group, layout): (usize, &ParamGroupLayout)| {
        let kinds = iter::once(&Saved::Weight).chain(slots).filter(|saved| values.has(group, saved)).count();
        let numel: usize =
            entries_of(layout, group, &Saved::Weight, index).iter().map(|e| e.range.len()).sum();
        (kinds * numel * size_of::<f32>()) as u64
    };
    layout.iter().enumerate().map(of_group).sum()
}

/// Writes chunk `index` of every group into two files of `folder`, one for weights and one for the
/// optimizer's `slots` if there are any.
pub(super) fn write_chunk(
    folder: &Path,
    layout: &[ParamGroupLayout],
    index: usize,
    slots: &[Saved],
    values: &mut impl Values,
) -> Result<WriterOutput> {
    let chunks = layout.first().map_or(1, |group| group.chunks);
    let mut part = WriterOutput::default();
    for (kind, saved) in [("model", &[Saved::Weight][..]), ("optimizer", slots)] {
        let groups: Vec<_> = saved
            .iter()
            .flat_map(|saved| (0..layout.len()).map(move |group| (group, saved)))
            .filter(|(group, saved)| values.has(*group, saved))
            .collect();
        if groups.is_empty() {
            continue;
        }
        let entries: Vec<_> = groups
            .iter()
            .flat_map(|(group, saved)| entries_of(&layout[*group], *group, saved, index))
            .collect();
        let name = format!("{kind}-part-{:05}-of-{chunks:05}.safetensors", index + 1);
        let mut file = PartFile::create(folder, name, layout, entries.clone())?;
        let mut entries = entries.iter().peekable();
        for (group, saved) in groups {
            while let Some(entry) = entries.next_if(|e| (e.group, &e.saved) == (group, saved)) {
                file.put(&values.get(layout, entry)?)?;
            }
            values.done(group, saved);
        }
        file.finish(&mut part)?;
    }
    Ok(part)
}

fn entries_of(layout: &ParamGroupLayout, group: usize, saved: &Saved, index: usize) -> Vec<Entry> {
    let chunk = layout.chunk_range(index);
    let parameters = layout.parameters.iter().enumerate();
    parameters
        .map(|(slot, parameter)| {
            let (_, range) = parameter.held_by(&chunk);
            Entry { group, slot, saved: saved.clone(), range }
        })
        .filter(|entry| !entry.range.is_empty())
        .collect()
}

fn part_file(index: usize) -> String {
    format!("part-{index:05}.json")
}

impl WriterOutput {
    /// Writes the description of this part to `folder`, for the rank that completes the checkpoint.
    pub(super) fn leave(&self, folder: &Path, index: usize) -> Result<()> {
        let path = folder.join(part_file(index));
        let json = serde_json::to_vec(self).map_err(|e| CheckpointError::damaged(&path, e))?;
        // Renamed, so that it only appears when it is complete.
        let beside = path.with_extension("partial");
        disk::write(&beside, &json)?;
        disk::rename(&beside, &path)
    }

    /// Reads the description by the writer `index` in `folder`; `None` if it or a file that it describes is
    /// not visible there completely.
    fn find(folder: &Path, index: usize) -> Result<Option<WriterOutput>> {
        let path = folder.join(part_file(index));
        let json = match files::read(&path, MAX_MANIFEST) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            other => other.map_err(CheckpointError::io("read", &path))?,
        };
        let part: WriterOutput =
            serde_json::from_slice(&json).map_err(|error| CheckpointError::damaged(&path, error))?;
        // Opening asks the server of a network file system; a plain lookup may be answered from a cache.
        let is_there = |(name, entry): (&String, &FileEntry)| {
            let found = files::open(&folder.join(name)).and_then(|file| file.metadata());
            found.is_ok_and(|found| found.len() == entry.bytes)
        };
        Ok(part.files.iter().all(is_there).then_some(part))
    }
}

/// The parts found in a folder.
pub(super) enum Left {
    /// The parts of all writers, with all their files.
    All(Vec<WriterOutput>),
    /// The parts of these writers are missing.
    Without(Vec<usize>),
}

/// Finds the parts of `count` writers in `folder`. Lists the folder again, and looks up only names that are
/// listed: a network file system may cache for long that a name did not exist.
pub(super) fn find_all(folder: &Path, count: usize) -> Result<Left> {
    let listed = fs::read_dir(folder).and_then(|entries| entries.collect::<io::Result<Vec<_>>>());
    let listed = listed.map_err(CheckpointError::io("read", folder))?;
    let names: HashSet<_> = listed.iter().map(DirEntry::file_name).collect();
    let is_listed = |index: &usize| names.contains(OsStr::new(&part_file(*index)));
    let unlisted: Vec<_> = (0..count).filter(|index| !is_listed(index)).collect();
    if !unlisted.is_empty() {
        return Ok(Left::Without(unlisted));
    }
    let (mut parts, mut missing) = (Vec::new(), Vec::new());
    for index in 0..count {
        match WriterOutput::find(folder, index)? {
            Some(part) => parts.push(part),
            None => missing.push(index),
        }
    }
    Ok(if missing.is_empty() { Left::All(parts) } else { Left::Without(missing) })
}

/// Removes the descriptions by `count` writers in `folder`.
pub(super) fn forget_all(folder: &Path, count: usize) -> Result<()> {
    (0..count)
        .map(|index| folder.join(part_file(index)))
        .try_for_each(|path| fs::remove_file(&path).map_err(CheckpointError::io("remove", &path)))
}

/// A checkpoint whose data has been written, and the data needed to complete it.
pub(super) struct Completion<'a> {
    pub(super) format: Format,
    pub(super) ranks: usize,
    pub(super) layout: &'a [ParamGroupLayout],
    pub(super) parts: Vec<WriterOutput>,
    pub(super) context: &'a SaveContext,
}

impl Completion<'_> {
    /// Adds everything except the data to the folder `beside` and moves it to `place`. The last rename makes
    /// the whole checkpoint appear.
    pub(super) fn complete(self, beside: &Path, place: &Path) -> Result<()> {
        let Completion { format, ranks, layout, parts, context } = self;
        let tensors = tensors_of(layout, &parts);
        let mut files: BTreeMap<_, _> = parts.into_iter().flat_map(|part| part.files).collect();
        let mut others = Vec::new();
        if format == Format::Full {
            others.push(write_index(beside, &tensors)?);
        }
        if let Some(config) = &context.config {
            disk::write(&beside.join(CONFIG_FILE), config.as_bytes())?;
            others.push(CONFIG_FILE.to_owned());
        }
        for (name, content) in &context.files {
            disk::write(&beside.join(name), content)?;
            others.push(name.clone());
        }
        for name in others {
            let entry = entry_of(beside, &name)?;
            files.insert(name, entry);
        }
        let unreadable = |error: toml::de::Error| CheckpointError::damaged(beside, error);
        let manifest = Manifest {
            format_version: FORMAT_VERSION,
            format,
            ranks,
            architecture: Architecture::of_model(&context.state.model),
            optimizer: context.optimizer.clone(),
            state: context.state.clone(),
            config: context.config.as_deref().map(toml::from_str).transpose().map_err(unreadable)?,
            checksums: Checksum::NAME.to_owned(),
            groups: layout
                .iter()
                .map(|group| GroupEntry { name: group.name.clone(), trainable: group.trainable })
                .collect(),
            files,
            tensors,
        };
        // A checkpoint that could not be read again must not be written.
        manifest.check().map_err(|problem| CheckpointError::Context { problem })?;
        // Last: a folder with a manifest is complete.
        manifest.write(beside)?;
        disk::sync_folder(beside)?;
        disk::replace_folder(beside, place)?;
        disk::sync_folder(parent_of(place))
    }
}

fn tensors_of(layout: &[ParamGroupLayout], parts: &[WriterOutput]) -> Vec<TensorEntry> {
    let mut chunks: BTreeMap<(usize, usize, Saved), Vec<Chunk>> = BTreeMap::new();
    for written in parts.iter().flat_map(|part| &part.chunks) {
        let key = (written.group, written.slot, written.saved.clone());
        chunks.entry(key).or_default().push(written.chunk.clone());
    }
    chunks
        .into_iter()
        .map(|((group, slot, saved), mut chunks)| {
            chunks.sort_by_key(|chunk| chunk.offset);
            let parameter = &layout[group].parameters[slot];
            TensorEntry {
                name: parameter.name.clone(),
                saved,
                group,
                dtype: "F32".to_owned(),
                shape: parameter.shape.clone(),
                chunks,
            }
        })
        .collect()
}

/// A new folder for a checkpoint that a command creates next to `place`; removed unless it is moved to its
/// place. Its name is unique, so that no file of a user is touched.
pub(super) struct NewFolder {
    place: PathBuf,
    beside: StagingFolder,
}

impl NewFolder {
    /// Creates a folder for `place`, which must not exist.
    pub(super) fn create(place: &Path) -> Result<Self> {
        let parent = parent_of(place);
        fs::create_dir_all(parent).map_err(CheckpointError::io("create", parent))?;
        let beside = StagingFolder::create(place).map_err(CheckpointError::io("write beside", place))?;
        Ok(NewFolder { place: place.to_owned(), beside })
    }

    /// Returns the path at which to write.
    pub(super) fn path(&self) -> &Path {
        self.beside.path()
    }

    /// Completes a checkpoint from the written data, at its place.
    pub(super) fn complete(self, completion: Completion) -> Result<()> {
        // Checked again, because writing a large model takes time.
        check_free(&self.place)?;
        completion.complete(self.path(), &self.place)?;
        self.beside.gone();
        Ok(())
    }
}

/// Fails if anything exists at `place`, even a dangling link.
pub(super) fn check_free(place: &Path) -> Result<()> {
    match place.exists() || place.is_symlink() {
        true => Err(CheckpointError::Exists { path: place.to_owned() }),
        false => Ok(()),
    }
}

/// Creates the empty folder in which a run writes its checkpoint for `place`.
pub(super) fn begin(place: &Path) -> Result<PathBuf> {
    let beside = folder::beside(place);
    disk::remove(&beside)?;
    fs::create_dir_all(&beside).map_err(CheckpointError::io("create", &beside))?;
    Ok(beside)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two ranks' chunks of one group of weights.
    struct Weights;

    impl Values for Weights {
        fn has(&self, _unit: usize, saved: &Saved) -> bool {
            *saved == Saved::Weight
        }

        fn get(&self, _: &[ParamGroupLayout], entry: &Entry) -> Result<Cow<'_, [f32]>, CheckpointError> {
            Ok(vec![1.0; entry.range.len()].into())
        }
    }

    #[test]
    fn a_part_is_there_when_its_files_are() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let parameters = vec![("a".to_owned(), vec![300]), ("b".to_owned(), vec![300])];
        let layout = [ParamGroupLayout::new("unit".to_owned(), true, parameters, 2)];
        let missing = || match find_all(path, 2).unwrap() {
            Left::All(parts) => {
                assert_eq!(parts.len(), 2);
                Vec::new()
            }
            Left::Without(missing) => missing,
        };
        assert_eq!(missing(), [0, 1]);
        for index in [1, 0] {
            let part = write_chunk(path, &layout, index, &[], &mut Weights).unwrap();
            part.leave(path, index).unwrap();
            assert_eq!(missing(), if index == 1 { vec![0] } else { vec![] });
        }
        // The description of a part whose data is missing or incomplete.
        let data = path.join("model-part-00002-of-00002.safetensors");
        let bytes = fs::read(&data).unwrap();
        fs::remove_file(&data).unwrap();
        assert_eq!(missing(), [1]);
        fs::write(&data, &bytes[..bytes.len() - 1]).unwrap();
        assert_eq!(missing(), [1]);
        fs::write(&data, &bytes).unwrap();
        assert_eq!(missing(), [0; 0]);
        forget_all(path, 2).unwrap();
        assert_eq!(missing(), [0, 1]);
    }
}
