//! `manifest.json`: the parts of a checkpoint, and the checksums to verify that it is complete.

mod check;

use std::collections::BTreeMap;
use std::path::Path;

use kiln_shard::ParamGroupLayout;
use kiln_sys::Checksum;
use kiln_sys::files::{self, MAX_WHOLE};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::saved::Saved;
use super::{Architecture, CheckpointError, CheckpointState, MANIFEST_FILE, Result, SavedOptimizer, disk};

/// The version of the format that this build writes and reads.
pub const FORMAT_VERSION: u64 = 5;

/// Maximum size of a manifest.
pub(super) const MAX_MANIFEST: u64 = 1 << 30;

/// The distribution of the values over files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// One part per rank.
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

/// The contents of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// [`FORMAT_VERSION`] of the build that wrote it.
    pub format_version: u64,
    /// The distribution of the values over files.
    pub format: Format,
    /// Number of ranks of the run that wrote it.
    pub ranks: usize,
    /// The architecture that the weights belong to.
    pub architecture: Architecture,
    /// The optimizer that trained the weights, and its state.
    pub optimizer: SavedOptimizer,
    /// The position of the run.
    pub state: CheckpointState,
    /// The run's configuration; `None` for a model from elsewhere.
    pub config: Option<serde_json::Value>,
    /// The kind of all checksums.
    pub checksums: String,
    /// Parameters that are gathered together, in the order of the forward pass.
    pub groups: Vec<GroupEntry>,
    /// All files except the manifest.
    pub files: BTreeMap<String, FileEntry>,
    /// All weights and moments, in the order of the groups.
    pub tensors: Vec<TensorEntry>,
}

/// Parameters that are gathered together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupEntry {
    /// Name as in logs, such as `layers.3`.
    pub name: String,
    /// True if its parameters were trained.
    pub trainable: bool,
}

/// A file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Its length.
    pub bytes: u64,
    /// Number of bytes at its start that `checksum` covers: the header of a file of tensors, all of any other
    /// file. The chunks after the header have their own checksums.
    pub covered: u64,
    /// Checksum of these bytes.
    pub checksum: Checksum,
}

/// A weight, or a slot of the optimizer's state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorEntry {
    /// Full name of the parameter.
    pub name: String,
    /// Kind of its values.
    pub saved: Saved,
    /// Index of its group.
    pub group: usize,
    /// `F32`.
    pub dtype: String,
    /// Shape of the whole.
    pub shape: Vec<usize>,
    /// Locations of its elements, consecutive and without gaps.
    pub chunks: Vec<Chunk>,
}

/// Adjacent elements of a flat tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chunk {
    /// First element.
    pub offset: u64,
    /// Number of elements.
    pub length: u64,
    /// The file that contains them, under the key of the tensor.
    pub file: String,
    /// Checksum of their bytes.
    pub checksum: Checksum,
}

impl TensorEntry {
    /// Returns the key of this tensor in its files.
    pub fn key(&self) -> String {
        self.saved.key(&self.name)
    }

    /// Returns the number of elements of the whole.
    pub fn numel(&self) -> u64 {
        self.chunks.iter().map(|chunk| chunk.length).sum()
    }
}

impl Manifest {
    /// Reads and checks the manifest of the checkpoint in `folder`.
    ///
    /// # Errors
    ///
    /// If it is missing, cannot be read, has changed since it was written, or is inconsistent.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(MANIFEST_FILE);
        let bytes = files::read(&path, MAX_MANIFEST).map_err(CheckpointError::unreadable(&path))?;
        Manifest::from_bytes(&bytes).map_err(|problem| CheckpointError::damaged(&path, problem))
    }

    /// Parses the manifest in `bytes`. The error describes the fault in them.
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

    /// Writes the manifest into `folder` and waits until it is on the disk.
    pub(super) fn write(&self, folder: &Path) -> Result<()> {
        let path = folder.join(MANIFEST_FILE);
        let bytes = self.to_bytes().map_err(|error| CheckpointError::damaged(&path, error))?;
        disk::write(&path, &bytes)
    }

    /// Returns a JSON object whose first line is a checksum of everything that follows.
    pub(super) fn to_bytes(&self) -> Result<Vec<u8>, serde_json::Error> {
        let json = serde_json::to_string_pretty(self)?;
        // Without the brace, which is in the first line.
        let rest = format!("{}\n", json.trim_start_matches('{').trim_start_matches('\n'));
        Ok([seal(rest.as_bytes()).as_bytes(), rest.as_bytes()].concat())
    }

    /// Returns the layout of the groups over `ranks` ranks, as an engine with that many ranks would have it.
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

    /// Returns names and shapes of all weights.
    pub fn shapes(&self) -> BTreeMap<&str, &[usize]> {
        let weights = self.tensors.iter().filter(|tensor| tensor.saved == Saved::Weight);
        weights.map(|tensor| (tensor.name.as_str(), tensor.shape.as_slice())).collect()
    }

    /// Returns the bytes of all files that it describes.
    pub fn bytes(&self) -> u64 {
        self.files.values().fold(0, |sum, file| sum.saturating_add(file.bytes))
    }

    /// Returns the number of elements of all weights.
    pub fn num_parameters(&self) -> u64 {
        let weights = self.tensors.iter().filter(|tensor| tensor.saved == Saved::Weight);
        weights.map(TensorEntry::numel).sum()
    }
}

/// Returns the first line: the opening brace and a checksum of the rest.
fn seal(rest: &[u8]) -> String {
    format!("{{ \"checksum\": \"{}\",\n", Checksum::of(rest))
}

/// Returns the entry of a file without tensors in `folder`.
pub(super) fn entry_of(folder: &Path, name: &str) -> Result<FileEntry> {
    let path = folder.join(name);
    let content = files::read(&path, MAX_WHOLE).map_err(CheckpointError::io("read", &path))?;
    let bytes = content.len() as u64;
    Ok(FileEntry { bytes, covered: bytes, checksum: Checksum::of(&content) })
}

/// Fails unless a fully covered file matches the manifest.
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
