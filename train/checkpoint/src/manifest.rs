//! `manifest.json`: the content of a checkpoint, and checksums that detect missing or changed data.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};

use kiln_model::{ModelConfig, MoeConfig};
use kiln_shard::{LossScale, OwnedSlot, ParamGroupLayout};
use kiln_sys::Checksum;
use kiln_sys::files::{self, MAX_WHOLE};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Architecture, CheckpointError, CheckpointState, MANIFEST_FILE, Result, Saved, SavedOptimizer};

/// The version of the format that this build reads and writes.
pub const FORMAT_VERSION: u64 = 5;

pub(super) const MAX_MANIFEST: u64 = 1 << 30;

/// Maximum for counts of steps, samples and tokens, and for sequence lengths, so that sums cannot overflow.
const MAX_COUNT: u64 = 1 << 56;

const MAX_RANKS: u64 = 1 << 32;

/// Maximum total size of a checkpoint, so that sums of sizes cannot overflow.
const MAX_TOTAL_BYTES: u64 = 1 << 56;

/// Bytes per element: all values are f32.
pub(super) const WIDTH: u64 = size_of::<f32>() as u64;

/// Maximum number of custom blocks, which may have no parameters and therefore no group.
const MAX_BLOCKS: usize = 1 << 16;

/// Layout of the values in files.
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

/// The content of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// The [`FORMAT_VERSION`] of the build that wrote the checkpoint.
    pub format_version: u64,
    /// Layout of the values in files.
    pub format: Format,
    /// Number of ranks of the run that wrote the checkpoint.
    pub ranks: usize,
    /// The architecture that the weights belong to.
    pub architecture: Architecture,
    /// The optimizer that trained the weights, and its state.
    pub optimizer: SavedOptimizer,
    /// The position of the run.
    pub state: CheckpointState,
    /// The run's configuration; `None` for a model that was not trained by Kiln.
    pub config: Option<serde_json::Value>,
    /// The model that the adapters change, if the checkpoint contains only adapters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<BaseModel>,
    /// The algorithm of all checksums.
    pub checksums: String,
    /// Parameters that are gathered together, in the order of the forward pass.
    pub groups: Vec<GroupEntry>,
    /// All files except the manifest.
    pub files: BTreeMap<String, FileEntry>,
    /// All weights and moments, in the order of the groups.
    pub tensors: Vec<TensorEntry>,
}

/// The model that the adapters of a checkpoint change, whose weights the checkpoint does not contain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BaseModel {
    /// Absolute path of the model's folder.
    pub path: PathBuf,
    /// Checksum of the beginning of every weight, which distinguishes the model from others of its shape.
    pub beginnings: Checksum,
}

/// Parameters that are gathered together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupEntry {
    /// Name of the group as in logs, such as `layers.3`.
    pub name: String,
    /// True if the group's parameters were trained.
    pub trainable: bool,
}

/// A file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Size of the file in bytes.
    pub bytes: u64,
    /// Number of bytes at the start of the file that `checksum` covers: the header of a tensor file, or all of any
    /// other file.
    pub covered: u64,
    /// Checksum of the covered bytes.
    pub checksum: Checksum,
}

/// A weight, or a part of the optimizer's state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorEntry {
    /// Full name of the parameter.
    pub name: String,
    /// Kind of the values.
    pub saved: Saved,
    /// Index of the parameter's group.
    pub group: usize,
    /// Always `F32`.
    pub dtype: String,
    /// Shape of the whole tensor.
    pub shape: Vec<usize>,
    /// Locations of the tensor's elements, consecutive and without gaps.
    pub chunks: Vec<Chunk>,
}

/// Consecutive elements of a flat tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chunk {
    /// Index of the first element.
    pub offset: u64,
    /// Number of elements.
    pub length: u64,
    /// Name of the file that contains the elements, under the tensor's key.
    pub file: String,
    /// Checksum of the elements' bytes.
    pub checksum: Checksum,
}

impl TensorEntry {
    /// Returns the tensor's key in the files that contain it.
    pub fn key(&self) -> String {
        self.saved.key(&self.name)
    }

    /// Returns the number of elements of the whole tensor.
    pub fn numel(&self) -> u64 {
        self.chunks.iter().map(|chunk| chunk.length).sum()
    }

    /// Validates the tensor against `manifest`; the error describes the problem.
    fn check(&self, manifest: &Manifest) -> Result<(), String> {
        let product = self.shape.iter().try_fold(1u64, |product, size| product.checked_mul(*size as u64));
        let numel = product.filter(|numel| numel.checked_mul(WIDTH).is_some());
        let numel = numel.ok_or("its shape is too large")?;
        if self.dtype != "F32" {
            return Err(format!("its dtype is {}, expected F32", self.dtype));
        }
        let mut end = 0u64;
        for chunk in &self.chunks {
            if chunk.offset != end || chunk.length == 0 {
                return Err(format!("no chunk starts at element {end}"));
            }
            end = end.checked_add(chunk.length).ok_or("its chunks are too long")?;
            if !manifest.files.contains_key(&chunk.file) {
                return Err(format!("`{}` is not among the files", chunk.file));
            }
        }
        if end != numel {
            return Err(format!("its chunks hold {end} elements of {numel}"));
        }
        let optimizer = &manifest.optimizer;
        if self.saved.slot().is_some_and(|slot| !optimizer.names().any(|kept| kept == slot)) {
            return Err(format!("the optimizer `{}` has no such state", optimizer.name));
        }
        if self.group >= manifest.groups.len() {
            return Err(format!("there is no group {}", self.group));
        }
        Ok(())
    }
}

impl Manifest {
    /// Reads and validates the manifest of the checkpoint in `folder`. Fails if it is missing, unreadable, changed
    /// since it was written, or inconsistent.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(MANIFEST_FILE);
        let bytes = files::read(&path, MAX_MANIFEST).map_err(CheckpointError::unreadable(&path))?;
        Manifest::from_bytes(&bytes).map_err(|problem| CheckpointError::damaged(&path, problem))
    }

    fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        #[derive(Deserialize)]
        #[serde(expecting = "an object with the key `format_version`")]
        struct Version {
            format_version: u64,
        }
        let line = bytes.iter().position(|byte| *byte == b'\n').ok_or("it is truncated")?;
        let (first, rest) = bytes.split_at(line + 1);
        if first != seal(rest).as_bytes() {
            return Err("it does not match its own checksum".to_owned());
        }
        // The first line opens the JSON object that the rest completes.
        let json = [b"{", rest].concat();
        let Version { format_version } = serde_json::from_slice(&json).map_err(|error| error.to_string())?;
        if format_version != FORMAT_VERSION {
            return Err(format!("format version {format_version}, this build reads {FORMAT_VERSION}"));
        }
        let manifest: Manifest = serde_json::from_slice(&json).map_err(|error| error.to_string())?;
        manifest.check()?;
        Ok(manifest)
    }

    /// Returns a JSON object whose first line is a checksum of the rest.
    pub(super) fn to_bytes(&self) -> Result<Vec<u8>, serde_json::Error> {
        let json = serde_json::to_string_pretty(self)?;
        // The first line contains the opening brace.
        let rest = format!("{}\n", json.trim_start_matches('{').trim_start_matches('\n'));
        Ok([seal(rest.as_bytes()).as_bytes(), rest.as_bytes()].concat())
    }

    fn weights(&self) -> impl Iterator<Item = &TensorEntry> {
        self.tensors.iter().filter(|tensor| tensor.saved == Saved::Weight)
    }

    /// Returns the layout of the groups that an engine with `ranks` ranks would create.
    pub fn layout(&self, ranks: usize) -> Vec<ParamGroupLayout> {
        let mut parameters = vec![Vec::new(); self.groups.len()];
        for tensor in self.weights() {
            parameters[tensor.group].push((tensor.name.clone(), tensor.shape.clone()));
        }
        let layout = |(group, parameters): (&GroupEntry, _)| {
            ParamGroupLayout::new(group.name.clone(), group.trainable, parameters, ranks)
        };
        let mut layout: Vec<_> = self.groups.iter().zip(parameters).map(layout).collect();
        let mut owned: HashMap<&str, Vec<OwnedSlot>> = HashMap::new();
        for tensor in &self.tensors {
            if let Some(name) =
                tensor.saved.slot().filter(|slot| self.optimizer.owned.iter().any(|o| o == slot))
            {
                let slot = OwnedSlot { name: name.to_owned(), shape: tensor.shape.clone() };
                owned.entry(&tensor.name).or_default().push(slot);
            }
        }
        for parameter in layout.iter_mut().flat_map(|group| &mut group.parameters) {
            parameter.owned_slots = owned.remove(parameter.name.as_str()).unwrap_or_default();
        }
        layout
    }

    /// Returns names and shapes of all weights.
    pub fn shapes(&self) -> BTreeMap<&str, &[usize]> {
        self.weights().map(|tensor| (tensor.name.as_str(), tensor.shape.as_slice())).collect()
    }

    /// Returns the total size, in bytes, of all files in the manifest.
    pub fn bytes(&self) -> u64 {
        self.files.values().fold(0, |sum, file| sum.saturating_add(file.bytes))
    }

    /// Returns the number of elements of all weights.
    pub fn num_parameters(&self) -> u64 {
        self.weights().map(TensorEntry::numel).sum()
    }

    /// Validates the manifest, so that later code can trust its sizes and names. The checksum cannot replace this,
    /// because anyone can write a manifest with a valid checksum.
    pub(super) fn check(&self) -> Result<(), String> {
        if self.checksums != Checksum::NAME {
            return Err(format!("its checksums are `{}`", self.checksums));
        }
        self.check_state()?;
        self.check_names()?;
        let mut described: HashMap<&str, u64> = HashMap::new();
        for (name, file) in &self.files {
            if !files::is_plain_name(name) || name == MANIFEST_FILE {
                return Err(format!("`{name}` is not a name of a file of a checkpoint"));
            }
            if file.covered == file.bytes && file.bytes > MAX_WHOLE {
                return Err(format!("`{name}` is too large for a file without weights"));
            }
            described.insert(name, file.covered);
        }
        let mut seen = HashSet::new();
        for tensor in &self.tensors {
            let faulty = |problem: String| format!("`{}`: {problem}", tensor.key());
            tensor.check(self).map_err(faulty)?;
            if !seen.insert((tensor.name.as_str(), &tensor.saved)) {
                return Err(faulty("it occurs twice".to_owned()));
            }
            for chunk in &tensor.chunks {
                // A length that overflows does not match any file.
                if let Some(total) = described.get_mut(chunk.file.as_str()) {
                    *total = total.saturating_add(chunk.length.saturating_mul(WIDTH));
                }
            }
        }
        if self.bytes() > MAX_TOTAL_BYTES {
            return Err("its files are too large".to_owned());
        }
        for (name, FileEntry { bytes, .. }) in &self.files {
            let described = described[name.as_str()];
            if described != *bytes {
                return Err(format!("`{name}` has {bytes} bytes, of which {described} are described"));
            }
        }
        Ok(())
    }

    fn check_state(&self) -> Result<(), String> {
        let state = &self.state;
        state.model.validate().map_err(|error| error.to_string())?;
        if self.ranks == 0 || self.ranks as u64 > MAX_RANKS {
            return Err(format!("it was written by {} ranks, which is impossible", self.ranks));
        }
        let CheckpointState { step, skipped, next_sample, tokens, .. } = *state;
        if skipped > step {
            return Err(format!("{skipped} updates were skipped in {step} steps"));
        }
        let context = state.context_length as u64;
        let counts =
            [("step", step), ("next_sample", next_sample), ("tokens", tokens), ("context_length", context)];
        if let Some((key, value)) = counts.into_iter().find(|(_, value)| *value > MAX_COUNT) {
            return Err(format!("{key} = {value} is beyond the range of any run"));
        }
        if context == 0 {
            return Err("context_length = 0".to_owned());
        }
        match state.loss_scale {
            Some(LossScale { scale, .. }) if !(scale > 0.0 && scale.is_finite()) => {
                Err(format!("the loss scale is {scale}"))
            }
            _ => Ok(()),
        }
    }

    /// Validates the names, which are printed on terminals; the error describes the problem.
    fn check_names(&self) -> Result<(), String> {
        let Manifest { architecture, optimizer, .. } = self;
        let parts = architecture.parts.iter().flat_map(|part| [&part.kind, &part.name]);
        let named: Vec<_> = parts.chain([&architecture.name, &optimizer.name]).collect();
        if named.iter().any(|name| name.is_empty()) {
            return Err("it names a part or the optimizer with an empty name".to_owned());
        }
        let ModelConfig { block, attention, feed_forward, .. } = &self.state.model;
        let all = named.into_iter().chain(optimizer.names()).chain(block).chain([attention, feed_forward]);
        let all = all.chain(self.groups.iter().map(|group| &group.name));
        let mut all = all.chain(self.tensors.iter().map(|tensor| &tensor.name)).chain(self.files.keys());
        match all.find(|name| name.chars().any(char::is_control)) {
            Some(name) => Err(format!("the name {name:?} contains a control character")),
            None => Ok(()),
        }
    }

    /// Checks that each size of the model is a dimension of some weight. Code that builds the model must also compare
    /// the number of parameters. Skips the dimensions of custom blocks, which are unknown.
    pub(super) fn check_sizes(&self) -> Result<(), String> {
        let model = &self.state.model;
        if self.architecture != Architecture::decoder() {
            let groups = self.groups.len();
            return match model.layers <= groups.max(MAX_BLOCKS) {
                true => Ok(()),
                false => Err(format!("a model of {} layers, and {groups} parameter groups", model.layers)),
            };
        }
        let (weights, elements) = (self.shapes().len() as u64, self.num_parameters());
        let MoeConfig { experts, expert_d_ff, shared_expert_d_ff, .. } =
            model.moe.clone().unwrap_or_default();
        let sizes = [
            ("layers", model.layers, weights),
            ("vocab_size", model.vocab_size, elements),
            ("d_model", model.d_model, elements),
            ("heads", model.heads, elements),
            ("kv_heads", model.kv_heads, elements),
            ("head_dim", model.head_dim.unwrap_or_default(), elements),
            // A model in which every block has experts has no matrix of this width.
            ("d_ff", if model.moe.is_some() { 0 } else { model.d_ff }, elements),
            ("moe.experts", experts, elements),
            ("moe.expert_d_ff", expert_d_ff, elements),
            ("moe.shared_expert_d_ff", shared_expert_d_ff.unwrap_or_default(), elements),
        ];
        match sizes.into_iter().find(|(_, size, most)| *size as u64 > *most) {
            Some((key, size, _)) => Err(format!(
                "a model with {key} = {size}, and {weights} weights of {elements} elements together"
            )),
            None => Ok(()),
        }
    }
}

/// Returns the first line of a manifest: the opening brace and a checksum of `rest`.
fn seal(rest: &[u8]) -> String {
    format!("{{ \"checksum\": \"{}\",\n", Checksum::of(rest))
}

pub(super) fn entry_of(content: &[u8]) -> FileEntry {
    let bytes = content.len() as u64;
    FileEntry { bytes, covered: bytes, checksum: Checksum::of(content) }
}

/// Checks that a file without tensors matches its entry.
pub(super) fn check_plain_file(folder: &Path, name: &str, entry: &FileEntry) -> Result<()> {
    let path = folder.join(name);
    // A file of another length need not be read.
    let found = files::open(&path).map_err(CheckpointError::unreadable(&path))?.metadata();
    if found.map_err(CheckpointError::io("read", &path))?.len() == entry.bytes {
        let content = files::read(&path, MAX_WHOLE).map_err(CheckpointError::io("read", &path))?;
        if entry_of(&content) == *entry {
            return Ok(());
        }
    }
    Err(CheckpointError::damaged(&path, "it does not match its checksum"))
}

#[cfg(test)]
mod tests;
