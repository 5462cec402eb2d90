//! Checkpoints: what a run needs to go on, or a model to be used, in a folder that is there as a whole or
//! not.
//!
//! Beside them, [`hugging_face`] has models in the layout of Hugging Face, [`source`] a model on disk of either
//! kind, [`weights`] weights that are read in parts, and [`sharded`] the decoder that they are loaded into.
//!
//! # The folder
//!
//! `<out>/checkpoints/fsdp_cpt<step>/` holds
//!
//! | file | content |
//! |---|---|
//! | `manifest.json` | [`Manifest`]: what was trained and with which optimizer, where the run stood, and for every weight and moment where its chunks are, with their checksums |
//! | sharded: `model-part-0000i-of-0000n.safetensors`, `optimizer-part-…` | what rank *i* has written: its chunk of every group |
//! | full: `model-0000i-of-0000n.safetensors`, `optimizer-…` | group *i*, whole, under its names |
//! | full: `model.safetensors.index.json` | which file holds which weight, as Hugging Face lays it out |
//! | `config.toml`, `tokenizer.json` | what the run was started with |
//!
//! Pieces are the same under every strategy, so the same number of ranks writes the same bytes.
//!
//! # Writing
//!
//! [`Saver`] writes beside the place, syncs, renames, and then lets `latest` name the folder. In the
//! background, the step waits for nothing: see [`kiln_shard::Engine::snapshot`]. A save that does not get on
//! for `checkpoint.timeout_s` has failed; what was there before stays.
//!
//! # Reading
//!
//! [`Checkpoint`] finds what a rank needs by intersecting its shards with the saved chunks, whatever
//! the number of ranks and the strategy then and now. Ranks that have read parts of a chunk put
//! their checksums together, so that every byte is read once and every byte is checked.

mod context;
mod convert;
mod describe;
mod disk;
mod error;
mod folder;
mod full;
mod held;
pub mod hugging_face;
mod index;
mod manifest;
mod mismatch;
mod open;
mod origin;
mod part;
mod read_ahead;
mod reader;
mod saved;
mod saver;
pub mod sharded;
pub mod source;
mod status;
mod tensor_file;
mod verify;
pub mod weights;

use kiln_model::ModelConfig;
use kiln_shard::LossScale;
use serde::{Deserialize, Serialize};

pub use context::SaveContext;
pub use convert::{convert, convert_counted};
pub(crate) use describe::model_line;
pub use describe::{describe, shape_line};
pub use error::CheckpointError;
use error::Result;
pub use folder::{
    Keep, folder_of_run, later_than, mend_latest, move_later, place_of, removable, step_of, surplus, sweep,
};
pub use full::write_full;
pub use held::HeldFolder;
pub use kiln_storage::{Checksum, Stream};
pub use manifest::{Chunk, FORMAT_VERSION, FileEntry, Format, GroupEntry, Manifest, TensorEntry};
pub use open::Checkpoint;
pub use origin::{Architecture, CustomPart, SavedOptimizer};
pub use reader::CheckpointReader;
pub use saved::Saved;
pub use saver::{Progress, SaveOptions, Saver};
pub use verify::{Verified, verify, verify_counted};

/// Name of the manifest in the folder.
pub const MANIFEST_FILE: &str = "manifest.json";

const CONFIG_FILE: &str = "config.toml";
const TOKENIZER_FILE: &str = "tokenizer.json";

/// Where a run stands.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CheckpointState {
    /// Optimizer steps done.
    pub step: u64,
    /// Those of them whose update was left out, because a gradient was not a number.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub skipped: u64,
    /// What the loss was multiplied by, if gradients were `f16`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<LossScale>,
    /// Position in the global order of samples of the first sample that has not been trained on.
    pub next_sample: u64,
    /// Tokens trained on.
    pub tokens: u64,
    /// The state of everything random. All draws are functions of this seed, of names, and of the
    /// counters above, so nothing else is to be kept.
    pub seed: u64,
    /// Shape of the model.
    pub model: ModelConfig,
    /// The longest sequence, in tokens, that the model is made for.
    pub context_length: usize,
    /// Checksum of the training data, to notice when a run goes on with other data.
    pub data_sha256: Option<String>,
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// So that tests can tell how much memory reading something takes.
#[cfg(test)]
#[global_allocator]
static ALLOCATOR: kiln_shard::memory::CountingAllocator = kiln_shard::memory::CountingAllocator;
