//! The index of weights in several files, in the layout of Hugging Face.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::json;

use super::manifest::TensorEntry;
use super::saved::Saved;
use super::{Result, disk};

pub(super) const INDEX_FILE: &str = "model.safetensors.index.json";

/// Writes the index of the weights; returns its name.
pub(super) fn write_index(folder: &Path, tensors: &[TensorEntry]) -> Result<String> {
    let weights = tensors.iter().filter(|tensor| tensor.saved == Saved::Weight);
    let (mut total_size, mut weight_map) = (0, BTreeMap::new());
    for tensor in weights {
        total_size += tensor.numel() * size_of::<f32>() as u64;
        if let Some(chunk) = tensor.chunks.first() {
            weight_map.insert(tensor.name.as_str(), chunk.file.as_str());
        }
    }
    let path = folder.join(INDEX_FILE);
    let index = json!({"metadata": {"total_size": total_size}, "weight_map": weight_map});
    disk::write(&path, format!("{index:#}\n").as_bytes())?;
    Ok(INDEX_FILE.to_owned())
}
