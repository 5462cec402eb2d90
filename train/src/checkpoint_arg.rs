//! The argument that names the model of a command.

use std::path::{Path, PathBuf};

use clap::Args;

/// The checkpoint of a command: its only positional argument. `--checkpoint` is an earlier spelling.
#[derive(Args, Clone, Debug)]
#[group(required = true, multiple = false)]
pub struct CheckpointArg {
    /// Checkpoint folder, run folder (its newest checkpoint), or Hugging Face folder.
    #[arg(value_name = "CHECKPOINT")]
    checkpoint: Option<PathBuf>,
    #[arg(long = "checkpoint", value_name = "CHECKPOINT", hide = true)]
    checkpoint_flag: Option<PathBuf>,
}

impl CheckpointArg {
    /// Returns the folder.
    pub fn path(&self) -> &Path {
        // The argument parser requires one of the two.
        self.checkpoint.as_ref().or(self.checkpoint_flag.as_ref()).map_or(Path::new(""), PathBuf::as_path)
    }
}
