//! Models in the layout of Hugging Face: reading in place, import, export.
//!
//! - `config`: converts `config.json` to a [`kiln_model::ModelConfig`], key by key with `keys`; `describe`:
//!   converts it back; `tokens`: ids that start and end a text;
//! - `names`: names of weights on either side, and transposition of matrices;
//! - `tensors`: reading of safetensors files; `writer`: safetensors files, written as a stream;
//! - `folder`: a folder of `config.json` and safetensors as [`crate::weights::Weights`];
//! - `carried`: the small files that Kiln passes on unchanged;
//! - `export` and `import`, which write into an `output`; `download`: downloads from the hub (feature `hub`).
//!
//! Only safetensors are read: pickled weights run code when they are opened.

mod carried;
mod config;
mod describe;
mod download;
mod error;
mod export;
mod folder;
mod import;
mod keys;
mod names;
mod output;
mod tensors;
mod tokens;
mod writer;

pub use carried::{CarriedFile, carried_files, generation_file};
pub use config::FolderConfig;
pub use describe::{has_architecture, to_json};
pub use download::model as download;
pub use error::HuggingFaceError;
pub use export::{ExportDtype, export};
pub use folder::HuggingFaceFolder;
pub use import::import;
pub use names::{HuggingFaceName, hugging_face_names};
pub use output::check_free;
use tensors::WeightFile;
pub use tokens::{TokenIds, end_ids, token_ids};

/// The shape of the model and its special tokens.
const CONFIG_FILE: &str = "config.json";
/// Default settings of text generation.
const GENERATION_FILE: &str = "generation_config.json";
/// All weights, if they are in one file.
const MODEL_FILE: &str = "model.safetensors";
/// The file of each weight, if they are in several.
const INDEX_FILE: &str = "model.safetensors.index.json";
const TOKENIZER_FILE: &str = "tokenizer.json";
const TOKENIZER_CONFIG_FILE: &str = "tokenizer_config.json";

/// Files of a model that Kiln passes on unchanged, if they exist.
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
