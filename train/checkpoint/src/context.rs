//! The contents of a checkpoint other than the engine's values.

use std::sync::Arc;

use super::{CheckpointState, SavedOptimizer};

/// The contents of a checkpoint other than the engine's values.
#[derive(Clone, Debug)]
pub struct SaveContext {
    /// The optimizer that trained the weights. Replaced by the engine's own when an engine is saved.
    pub optimizer: SavedOptimizer,
    /// The position of the run.
    pub state: CheckpointState,
    /// The resolved configuration, as TOML.
    pub config: Option<String>,
    /// Names and contents of its other small files, such as `tokenizer.json`.
    pub files: Vec<(String, Arc<[u8]>)>,
}

impl SaveContext {
    /// Creates a context with only the state: no configuration, no files.
    pub fn new(state: CheckpointState) -> Self {
        SaveContext { optimizer: SavedOptimizer::adamw(), state, config: None, files: Vec::new() }
    }
}
