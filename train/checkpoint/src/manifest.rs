//! `manifest.json`: what a checkpoint consists of, and how to tell that it is whole.

mod check;

use std::collections::BTreeMap;
use std::path::Path;

use kiln_shard::ParamGroupLayout;
use kiln_storage::Checksum;
use kiln_storage::files::{self, MAX_WHOLE};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::saved::Saved;
use super::{Architecture, CheckpointError, CheckpointState, MANIFEST_FILE, Result, SavedOptimizer, disk};

/// The version of the format that this build writes and reads.
pub const FORMAT_VERSION: u64 = 5;

/// Manifests beyond this size are not read.
pub(super) const MAX_MANIFEST: u64 = 1 << 30;

/// How the values are spread over files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// Every rank has written its part.
    #[default]
    Sharded,
    /// Whole arrays, one file per group.
    Full,
}

impl std::fmt::Display for Format {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Format::Sharded => "sharded",
            Format::Full => "full",
        })
    }
}

/// What a checkpoint consists of.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// [`FORMAT_VERSION`] of the build that wrote it.
    pub format_version: u64,
    /// How the values are spread over files.
    pub format: Format,
    /// Ranks of the run that wrote it.
    pub ranks: usize,
    /// What computes with the weights.
    pub architecture: Architecture,
    /// What the weights were trained with, and what the moments are.
    pub optimizer: SavedOptimizer,
    /// Where the run stood.
    pub state: CheckpointState,
    /// The run's configuration; none for a model from elsewhere.
    pub config: Option<serde_json::Value>,
    /// The kind of all checksums.
    pub checksums: String,
    /// Parameters that are gathered together, in the order of the forward pass.
    pub groups: Vec<GroupEntry>,
    /// All files but the manifest.
    pub files: BTreeMap<String, FileEntry>,
    /// All weights and moments, in the order of the groups.
    pub tensors: Vec<TensorEntry>,
}

/// Parameters that are gathered together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupEntry {
    /// As in logs, such as `layers.3`.
    pub name: String,
    /// Whether its parameters were trained.
    pub trainable: bool,
}

/// A file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Its length.
    pub bytes: u64,
    /// Bytes from its start on that `checksum` is of: the header of a file of tensors, all of any
    /// other. What follows is chunks, which have checksums of their own.
    pub covered: u64,
    /// Of these bytes.
    pub checksum: Checksum,
}

/// A weight, or a slot of the optimizer's state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorEntry {
    /// Full name of the parameter.
    pub name: String,
    /// What of it.
    pub saved: Saved,
    /// Position of its group.
    pub group: usize,
    /// `F32`.
    pub dtype: String,
    /// Shape of the whole.
    pub shape: Vec<usize>,
    /// Where its elements are; one after the other, without gaps.
    pub chunks: Vec<Chunk>,
}

/// Neighbouring elements of a flat tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chunk {
    /// First element.
    pub offset: u64,
    /// Number of elements.
    pub length: u64,
    /// The file that holds them, under the key of the tensor.
    pub file: String,
    /// Of their bytes.
    pub checksum: Checksum,
}

impl TensorEntry {
    /// The key of this tensor in its files.
    pub fn key(&self) -> String {
        self.saved.key(&self.name)
    }

    /// Number of elements of the whole.
    pub fn numel(&self) -> u64 {
        self.chunks.iter().map(|chunk| chunk.length).sum()
    }
}

impl Manifest {
    /// Reads and checks the manifest of the checkpoint in `folder`.
    ///
    /// # Errors
    ///
    /// When it is missing, cannot be read, is not as it was written, or does not make sense.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(MANIFEST_FILE);
        let bytes = files::read(&path, MAX_MANIFEST).map_err(CheckpointError::unreadable(&path))?;
        Manifest::from_bytes(&bytes).map_err(|problem| CheckpointError::damaged(&path, problem))
    }

    /// The manifest in `bytes`, or what is wrong with them.
    pub(super) fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        #[derive(Deserialize)]
        #[serde(expecting = "an object with the key `format_version`")]
        struct Version {
            format_version: u64,
        }
        let wrong = "it does not match its own checksum";
        let (first, rest) = bytes
            .iter()
            .position(|byte| *byte == b'\n')
            .map(|end| bytes.split_at(end + 1))
            .ok_or("it is cut off")?;
        if first != seal(rest).as_bytes() {
            return Err(wrong.to_owned());
        }
        // The first line opens the object that the rest completes.
        let json = [b"{", rest].concat();
        let Version { format_version } = serde_json::from_slice(&json).map_err(|error| error.to_string())?;
        if format_version != FORMAT_VERSION {
            return Err(format!("format version {format_version}, this build reads {FORMAT_VERSION}"));
        }
        let manifest: Manifest = serde_json::from_slice(&json).map_err(|error| error.to_string())?;
        manifest.check()?;
        Ok(manifest)
    }

    /// Writes it into `folder` and waits until it is on the disk.
    pub(super) fn write(&self, folder: &Path) -> Result<()> {
        let path = folder.join(MANIFEST_FILE);
        let bytes = self.to_bytes().map_err(|error| CheckpointError::damaged(&path, error))?;
        disk::write(&path, &bytes)
    }

    /// A JSON object whose first line is a checksum of all that follows.
    pub(super) fn to_bytes(&self) -> Result<Vec<u8>, serde_json::Error> {
        let json = serde_json::to_string_pretty(self)?;
        // Without the brace, which the first line has.
        let rest = format!("{}\n", json.trim_start_matches('{').trim_start_matches('\n'));
        Ok([seal(rest.as_bytes()).as_bytes(), rest.as_bytes()].concat())
    }

    /// The layout of the groups over `ranks` ranks: what an engine of as many would have.
    pub fn layout(&self, ranks: usize) -> Vec<ParamGroupLayout> {
        let mut parameters = vec![Vec::new(); self.groups.len()];
        for tensor in self.tensors.iter().filter(|tensor| tensor.saved == Saved::Weight) {
            parameters[tensor.group].push((tensor.name.clone(), tensor.shape.clone()));
        }
        let groups = self.groups.iter().zip(parameters);
        groups
            .map(|(group, parameters)| {
                ParamGroupLayout::new(group.name.clone(), group.trainable, parameters, ranks)
            })
            .collect()
    }

    /// Names and shapes of all weights.
    pub fn shapes(&self) -> BTreeMap<&str, &[usize]> {
        let weights = self.tensors.iter().filter(|tensor| tensor.saved == Saved::Weight);
        weights.map(|tensor| (tensor.name.as_str(), tensor.shape.as_slice())).collect()
    }

    /// Bytes of all files that it describes.
    pub fn bytes(&self) -> u64 {
        self.files.values().fold(0, |sum, file| sum.saturating_add(file.bytes))
    }

    /// Number of elements of all weights.
    pub fn num_parameters(&self) -> u64 {
        let weights = self.tensors.iter().filter(|tensor| tensor.saved == Saved::Weight);
        weights.map(TensorEntry::numel).sum()
    }
}

/// The first line: the opening brace and a checksum of the rest.
fn seal(rest: &[u8]) -> String {
    format!("{{ \"checksum\": \"{}\",\n", Checksum::of(rest))
}

/// The entry of a file that is no file of tensors, as it is in `folder`.
pub(super) fn entry_of(folder: &Path, name: &str) -> Result<FileEntry> {
    let path = folder.join(name);
    let content = files::read(&path, MAX_WHOLE).map_err(CheckpointError::io("read", &path))?;
    let bytes = content.len() as u64;
    Ok(FileEntry { bytes, covered: bytes, checksum: Checksum::of(&content) })
}

/// Fails unless a file that is covered as a whole is as the manifest describes it.
pub(super) fn check_plain_file(folder: &Path, name: &str, entry: &FileEntry) -> Result<()> {
    let path = folder.join(name);
    let found = files::open(&path).map_err(CheckpointError::unreadable(&path))?.metadata();
    let bytes = found.map_err(CheckpointError::io("read", &path))?.len();
    if bytes == entry.bytes && entry_of(folder, name)? == *entry {
        return Ok(());
    }
    Err(CheckpointError::damaged(&path, "it does not match its checksum"))
}

#[cfg(test)]
mod tests;
