//! The index of weights over several files, in the layout of Hugging Face.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Serialize;

use super::manifest::TensorEntry;
use super::saved::Saved;
use super::{CheckpointError, disk};

pub(super) const INDEX_FILE: &str = "model.safetensors.index.json";

/// `model.safetensors.index.json`, in the layout of Hugging Face.
#[derive(Serialize)]
struct Index<'a> {
    metadata: IndexMetadata,
    weight_map: BTreeMap<&'a str, &'a str>,
}

#[derive(Serialize)]
struct IndexMetadata {
    total_size: u64,
}

/// Writes the index of the weights; returns its name.
pub(super) fn write_index(folder: &Path, tensors: &[TensorEntry]) -> Result<String, CheckpointError> {
    let weights = tensors.iter().filter(|tensor| tensor.saved == Saved::Weight);
    let (mut total_size, mut weight_map) = (0, BTreeMap::new());
    for tensor in weights {
        total_size += tensor.numel() * size_of::<f32>() as u64;
        if let Some(chunk) = tensor.chunks.first() {
            weight_map.insert(tensor.name.as_str(), chunk.file.as_str());
        }
    }
    let path = folder.join(INDEX_FILE);
    let index = Index { metadata: IndexMetadata { total_size }, weight_map };
    let mut json =
        serde_json::to_string_pretty(&index).map_err(|error| CheckpointError::damaged(&path, error))?;
    json.push('\n');
    disk::write(&path, json.as_bytes())?;
    Ok(INDEX_FILE.to_owned())
}
