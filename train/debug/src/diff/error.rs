//! Errors of comparisons.

use std::path::PathBuf;

use crate::hash::HashesError;

/// An error that prevents a comparison.
#[derive(Debug, thiserror::Error)]
pub enum DiffError {
    /// The path does not exist.
    #[error("there is nothing at {}: name a run folder, a checkpoint, or a file of a run", .path.display())]
    Missing { path: PathBuf },
    /// The path exists but is not something that can be compared.
    #[error(
        "{} is nothing that can be compared: name a run folder, a checkpoint, a Hugging Face folder, prepared \
         data, a configuration (.toml), or the metrics or hashes of a run (.jsonl)",
        .path.display()
    )]
    Unknown { path: PathBuf },
    /// The two have nothing in common. `what`: a description of each.
    #[error("{what}: they have nothing that can be compared")]
    Nothing { what: String },
    /// Both are of the same kind, but have no part in common.
    #[error("{what} cannot be compared: {reason}")]
    Apart { what: String, reason: String },
    /// A file of a run cannot be read or is damaged.
    #[error("{reason}")]
    File { reason: String },
}

impl From<HashesError> for DiffError {
    fn from(error: HashesError) -> Self {
        DiffError::File { reason: error.to_string() }
    }
}
