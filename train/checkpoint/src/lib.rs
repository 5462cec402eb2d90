//! Checkpoints: folders with a model and the state that a run needs to resume, which appear complete or not at all.
//!
//! [`hugging_face`] reads models in the Hugging Face layout, and [`source`] reads models in either format. [`weights`]
//! reads weights in parts, and [`sharded`] is the decoder that loads them.
//!
//! # The folder
//!
//! `<out>/checkpoints/fsdp_cpt<step>/` contains
//!
//! | file | content |
//! |---|---|
//! | `manifest.json` | [`Manifest`]: model, optimizer, position of the run, places and checksums of all chunks |
//! | sharded: `model-part-0000i-of-0000n.safetensors`, `optimizer-part-…` | rank *i*'s chunk of every group |
//! | full: `model-0000i-of-0000n.safetensors`, `optimizer-…` | group *i*, whole, under its names |
//! | full: `model.safetensors.index.json` | the file of each weight, in the layout of Hugging Face |
//! | `config.toml`, `tokenizer.json` | the run's configuration and tokenizer |
//!
//! Chunks do not depend on the sharding strategy: the same number of ranks writes the same bytes.
//!
//! [`Saver`] writes to a temporary folder next to the final one, syncs it, renames it, and then updates `latest`.
//!
//! [`Checkpoint`] intersects a rank's shards with the saved chunks, so the number of ranks and the strategy may change
//! between save and load. Every byte is read once and checked.

mod convert;
mod describe;
mod error;
mod export;
mod folder;
mod held;
pub mod hugging_face;
mod import;
mod manifest;
mod merge;
mod open;
mod origin;
mod reader;
mod saver;
pub mod sharded;
pub mod source;
mod status;
mod tensor_file;
pub mod weights;
mod write;

use std::sync::Arc;

use kiln_model::ModelConfig;
use kiln_shard::LossScale;
use serde::{Deserialize, Serialize};

pub use convert::{Verified, convert, verify};
pub use describe::{describe, shape_line};
use error::Result;
pub use error::{CheckpointError, Mismatch};
pub use export::{ExportDtype, export, export_adapters};
pub use folder::{
    Keep, checkpoint_path, checkpoints_folder, fix_latest, later_than, move_later, removable, step_of,
    surplus, sweep,
};
pub use held::HeldFolder;
pub use import::import;
pub use kiln_sys::{Checksum, Stream};
pub use manifest::{BaseModel, Chunk, FORMAT_VERSION, FileEntry, Format, GroupEntry, Manifest, TensorEntry};
pub use open::Checkpoint;
pub use origin::{Architecture, CustomPart, Saved, SavedOptimizer};
pub use reader::{CheckpointReader, resume};
pub use saver::{Progress, SaveOptions, Saver, save};
pub use write::check_free;

/// File name of the manifest.
pub const MANIFEST_FILE: &str = "manifest.json";

const CONFIG_FILE: &str = "config.toml";
const TOKENIZER_FILE: &str = "tokenizer.json";

/// The position of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CheckpointState {
    /// Number of completed optimizer steps.
    pub step: u64,
    /// Number of steps whose update was skipped because a gradient was not finite.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub skipped: u64,
    /// Scale of the loss; `None` unless gradients were `f16`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<LossScale>,
    /// Position, in the global order of samples, of the next sample to train on.
    pub next_sample: u64,
    /// Number of tokens trained on.
    pub tokens: u64,
    /// Seed of all randomness. Every random draw depends only on this seed, on names, and on the counters above.
    pub seed: u64,
    /// Shape of the model.
    pub model: ModelConfig,
    /// The longest sequence, in tokens, that the model supports.
    pub context_length: usize,
    /// Checksum of the training data, to detect that a run resumes with different data.
    pub data_sha256: Option<String>,
}

impl CheckpointState {
    /// Returns the position before the first step.
    pub fn new(model: ModelConfig, context_length: usize) -> Self {
        CheckpointState {
            step: 0,
            skipped: 0,
            loss_scale: None,
            next_sample: 0,
            tokens: 0,
            seed: 0,
            model,
            context_length,
            data_sha256: None,
        }
    }

    /// Returns the position after `step` steps of `global_batch` samples, each as long as the context.
    pub fn at(self, step: u64, global_batch: u64) -> Self {
        let next_sample = step * global_batch;
        CheckpointState { step, next_sample, tokens: next_sample * self.context_length as u64, ..self }
    }
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// The content of a checkpoint other than the engine's values.
#[derive(Clone, Debug)]
pub struct SaveContext {
    /// The optimizer that trained the weights. When an engine is saved, the engine's optimizer replaces it.
    pub optimizer: SavedOptimizer,
    /// The position of the run.
    pub state: CheckpointState,
    /// The resolved configuration, as TOML.
    pub config: Option<String>,
    /// Names and contents of other small files, such as `tokenizer.json`.
    pub files: Vec<(String, Arc<[u8]>)>,
    /// The model that trained adapters change: if set, frozen weights are not saved.
    pub base: Option<BaseModel>,
}

impl SaveContext {
    /// Creates a context with only the state: no configuration, no files.
    pub fn new(state: CheckpointState) -> Self {
        SaveContext { optimizer: SavedOptimizer::adamw(), state, config: None, files: Vec::new(), base: None }
    }
}

#[cfg(test)]
#[global_allocator]
static ALLOCATOR: kiln_shard::memory::CountingAllocator = kiln_shard::memory::CountingAllocator;
