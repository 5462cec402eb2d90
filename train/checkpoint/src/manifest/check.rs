//! Checks of a manifest: its contents must be consistent, and must not make a reader use more resources than
//! the files warrant. A checksum proves that it is unchanged, but not its author.

use std::collections::{BTreeMap, HashMap, HashSet};

use kiln_model::{ModelConfig, MoeConfig};
use kiln_shard::LossScale;
use kiln_sys::files::{self, MAX_WHOLE};

use super::{FileEntry, Manifest, TensorEntry};
use crate::{Architecture, CheckpointState, Checksum, MANIFEST_FILE};

/// Upper limit of steps, samples, tokens and the length of a sequence, so that sums of such numbers cannot
/// overflow.
const MAX_COUNT: u64 = 1 << 56;

/// Upper limit of ranks.
const MAX_RANKS: u64 = 1 << 32;

/// Upper limit of the size of a checkpoint, so that sums of sizes cannot overflow.
const MAX_TOTAL_BYTES: u64 = 1 << 56;

/// Bytes of an element: data is f32.
const WIDTH: u64 = size_of::<f32>() as u64;

/// Maximum number of custom blocks, which may have no parameters and therefore no group.
const MAX_BLOCKS: usize = 1 << 16;

impl TensorEntry {
    /// Returns the number of elements of the whole; `None` if it overflows.
    fn checked_numel(&self) -> Option<u64> {
        let numel = self
            .shape
            .iter()
            .try_fold(1u64, |product, size| product.checked_mul(u64::try_from(*size).ok()?))?;
        numel.checked_mul(WIDTH).is_some().then_some(numel)
    }

    /// Checks the tensor; the error describes the fault.
    fn check(&self, files: &BTreeMap<String, FileEntry>) -> Result<(), String> {
        let numel = self.checked_numel().ok_or("its shape is too large")?;
        if self.dtype != "F32" {
            return Err(format!("its dtype is {}, expected F32", self.dtype));
        }
        let mut end = 0u64;
        for chunk in &self.chunks {
            if chunk.offset != end || chunk.length == 0 {
                return Err(format!("no chunk starts at element {end}"));
            }
            end = end.checked_add(chunk.length).ok_or("its chunks are too long")?;
            if !files.contains_key(&chunk.file) {
                return Err(format!("`{}` is not among the files", chunk.file));
            }
        }
        if end != numel { Err(format!("its chunks hold {end} elements of {numel}")) } else { Ok(()) }
    }
}

impl Manifest {
    /// Checks that the manifest is consistent, so that later code need not check again; the error describes
    /// the fault.
    pub(crate) fn check(&self) -> Result<(), String> {
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
            described.insert(name, file.covered);
        }
        let mut seen = HashSet::new();
        for tensor in &self.tensors {
            let of = |problem: String| format!("`{}`: {problem}", tensor.key());
            tensor.check(&self.files).map_err(of)?;
            if tensor.saved.slot().is_some_and(|name| !self.optimizer.keeps(name)) {
                return Err(of(format!("`{}` keeps no such state", self.optimizer.name)));
            }
            if !seen.insert((tensor.name.as_str(), &tensor.saved)) {
                return Err(of("it is there twice".to_owned()));
            }
            if tensor.group >= self.groups.len() {
                return Err(of(format!("there is no group {}", tensor.group)));
            }
            for chunk in &tensor.chunks {
                let bytes = chunk.length.checked_mul(WIDTH);
                let total = described.get_mut(chunk.file.as_str());
                // A length that overflows does not match any file.
                if let (Some(total), Some(bytes)) = (total, bytes) {
                    *total = total.saturating_add(bytes);
                }
            }
        }
        if self.bytes() > MAX_TOTAL_BYTES {
            return Err("its files are too large".to_owned());
        }
        let plain = |(_, file): &(&String, &FileEntry)| file.covered == file.bytes;
        if let Some((name, _)) = self.files.iter().filter(plain).find(|(_, f)| f.bytes > MAX_WHOLE) {
            return Err(format!("`{name}` is too large for a file without weights"));
        }
        let undescribed = self.files.iter().find(|(name, file)| described[name.as_str()] != file.bytes);
        if let Some((name, file)) = undescribed {
            return Err(format!(
                "`{name}` has {} bytes, of which {} are described",
                file.bytes,
                described[name.as_str()]
            ));
        }
        Ok(())
    }

    /// Checks the numbers of the run's position; the error describes the fault.
    fn check_state(&self) -> Result<(), String> {
        let state = &self.state;
        state.model.validate().map_err(|error| error.to_string())?;
        if self.ranks == 0 || self.ranks as u64 > MAX_RANKS {
            return Err(format!("it was written by {} ranks, which cannot be", self.ranks));
        }
        if state.skipped > state.step {
            let CheckpointState { step, skipped, .. } = state;
            return Err(format!("{skipped} updates were skipped in {step} steps"));
        }
        let context = state.context_length as u64;
        let counts = [("step", state.step), ("next_sample", state.next_sample)];
        let counts = counts.into_iter().chain([("tokens", state.tokens), ("context_length", context)]);
        if let Some((key, value)) = counts.into_iter().find(|(_, value)| *value > MAX_COUNT) {
            return Err(format!("{key} = {value} is more than any run gets to"));
        }
        if context == 0 {
            return Err("context_length = 0".to_owned());
        }
        let is_scale = |scale: f64| scale > 0.0 && scale.is_finite();
        match state.loss_scale {
            Some(LossScale { scale, .. }) if !is_scale(scale) => Err(format!("the loss scale is {scale}")),
            _ => Ok(()),
        }
    }

    /// Checks the names, which are printed on terminals; the error describes the fault.
    fn check_names(&self) -> Result<(), String> {
        let Manifest { architecture, optimizer, .. } = self;
        let parts = architecture.parts.iter().flat_map(|part| [&part.kind, &part.name]);
        let named: Vec<_> = parts.chain([&architecture.name, &optimizer.name]).collect();
        if named.iter().any(|name| name.is_empty()) {
            return Err("it names a part or the optimizer with an empty name".to_owned());
        }
        let others = optimizer.state.iter().chain(self.groups.iter().map(|group| &group.name));
        let others = others.chain(self.tensors.iter().map(|tensor| &tensor.name));
        let ModelConfig { block, attention, feed_forward, .. } = &self.state.model;
        let layers = block.iter().chain([attention, feed_forward]);
        let all = named.into_iter().chain(layers).chain(others).chain(self.files.keys());
        match all.into_iter().find(|name| name.chars().any(char::is_control)) {
            Some(name) => Err(format!("the name {name:?} has a character that cannot be shown")),
            None => Ok(()),
        }
    }

    /// Checks the sizes of its model, each of which is a size of some weight. Code that builds the model must
    /// call [`Manifest::check_parameters`] as well. The sizes of blocks that are not built in are unknown.
    pub(crate) fn check_sizes(&self) -> Result<(), String> {
        let model = &self.state.model;
        if self.architecture != Architecture::decoder() {
            let groups = self.groups.len();
            return match model.layers <= groups.max(MAX_BLOCKS) {
                true => Ok(()),
                false => Err(format!("a model of {} layers, and {groups} parameter groups", model.layers)),
            };
        }
        let (weights, elements) = (self.shapes().len() as u64, self.num_parameters());
        let ModelConfig { vocab_size, d_model, layers, heads, kv_heads, head_dim, d_ff, ref moe, .. } =
            *model;
        let MoeConfig { experts, expert_d_ff, shared_expert_d_ff, .. } = moe.clone().unwrap_or_default();
        let sizes = [
            ("layers", layers, weights),
            ("vocab_size", vocab_size, elements),
            ("d_model", d_model, elements),
            ("heads", heads, elements),
            ("kv_heads", kv_heads, elements),
            ("head_dim", head_dim.unwrap_or_default(), elements),
            // A model in which every block has experts has no matrix of this width.
            ("d_ff", if moe.is_some() { 0 } else { d_ff }, elements),
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

    /// Checks the number of parameters of its model, `said`, which takes memory before any weight is read.
    pub(crate) fn check_parameters(&self, said: usize) -> Result<(), String> {
        let (said, there) = (said as u64, self.num_parameters());
        if said == there {
            return Ok(());
        }
        Err(format!("a model of {said} parameters, and weights of {there}"))
    }
}
