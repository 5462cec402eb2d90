//! What goes into a checkpoint besides the values of the engine.

use std::sync::Arc;

use super::{CheckpointState, SavedOptimizer};

/// What goes into a checkpoint besides the engine's values.
#[derive(Clone, Debug)]
pub struct SaveContext {
    /// What the weights were trained with. An engine that is saved says it itself.
    pub optimizer: SavedOptimizer,
    /// Where the run stands.
    pub state: CheckpointState,
    /// The resolved configuration, as TOML.
    pub config: Option<String>,
    /// Names and contents of its other small files, such as `tokenizer.json`.
    pub files: Vec<(String, Arc<[u8]>)>,
}

impl SaveContext {
    /// With nothing but the state: no configuration, no files.
    pub fn new(state: CheckpointState) -> Self {
        SaveContext { optimizer: SavedOptimizer::adamw(), state, config: None, files: Vec::new() }
    }
}
