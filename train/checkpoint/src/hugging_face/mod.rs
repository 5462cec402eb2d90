//! Models in the Hugging Face layout: reading them in place, and downloading them. Only safetensors files are read,
//! because pickled weights can run code when they are opened.

pub(crate) mod adapter;
pub(crate) mod config;
pub(crate) mod folder;
mod hub;
mod keys;
pub(crate) mod names;
mod tokens;
mod weight_file;

use std::path::Path;

use kiln_sys::files;

use crate::error::Result;
use crate::write::INDEX_FILE;
use crate::{CheckpointError, TOKENIZER_FILE};

pub use adapter::AdapterFolder;
pub use config::{FolderConfig, has_architecture};
pub use folder::HuggingFaceFolder;
pub use hub::download;
pub use tokens::{
    CarriedFile, SamplingDefaults, TokenIds, carried_files, generation_file, sampling_defaults, token_ids,
};

pub(crate) const CONFIG_FILE: &str = "config.json";
pub(crate) const GENERATION_FILE: &str = "generation_config.json";
pub(crate) const MODEL_FILE: &str = "model.safetensors";
pub(crate) const TOKENIZER_CONFIG_FILE: &str = "tokenizer_config.json";

/// Files of a model that Kiln copies unchanged, if they exist.
const CARRIED: [&str; 10] = [
    TOKENIZER_FILE,
    TOKENIZER_CONFIG_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    GENERATION_FILE,
];

/// Fails if links lead from the file `name` in `folder` out of `folder`. Accepts a missing file.
fn check_inside(folder: &Path, name: &str) -> Result<()> {
    let leads_out = |target| CheckpointError::LeadsOut { path: folder.join(name), target };
    files::way_out(folder, name).map_or(Ok(()), |target| Err(leads_out(target)))
}
