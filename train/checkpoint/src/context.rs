//! What goes into a checkpoint besides the values of the engine.

use std::path::PathBuf;
use std::sync::Arc;

use super::{CheckpointState, SavedOptimizer};

/// What goes into a checkpoint besides the engine's values.
#[derive(Clone, Debug)]
pub struct SaveContext {
    /// What the weights were trained with.
    pub optimizer: SavedOptimizer,
    /// Where the run stands.
    pub state: CheckpointState,
    /// The resolved configuration, as TOML.
    pub config: Option<String>,
    /// Files that are copied into it under their names.
    pub files: Vec<PathBuf>,
    /// What is to be its `tokenizer.json`, if that is none of the files.
    pub tokenizer: Option<Arc<[u8]>>,
}

impl SaveContext {
    /// Of a run under the built-in AdamW, without a configuration and files.
    pub fn built_in(state: CheckpointState) -> Self {
        SaveContext {
            optimizer: SavedOptimizer::adamw(),
            state,
            config: None,
            files: Vec::new(),
            tokenizer: None,
        }
    }
}
