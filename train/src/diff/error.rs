//! Why two things cannot be compared.

use std::path::PathBuf;

use crate::debug::hash::HashesError;

/// Why two things cannot be compared.
#[derive(Debug, thiserror::Error)]
pub enum DiffError {
    /// There is nothing at a path.
    #[error("there is nothing at {}: name a run folder, a checkpoint, or a file of a run", .path.display())]
    Missing { path: PathBuf },
    /// What is there is nothing that can be compared.
    #[error(
        "{} is nothing that can be compared: name a run folder, a checkpoint, a Hugging Face folder, prepared \
         data, a configuration (.toml), or the metrics or hashes of a run (.jsonl)",
        .path.display()
    )]
    Unknown { path: PathBuf },
    /// The two have nothing in common. `what`: what each of them is.
    #[error("{what}: they have nothing that can be compared")]
    Nothing { what: String },
    /// They are of one kind, and say nothing of the same thing.
    #[error("{what} cannot be compared: {reason}")]
    Apart { what: String, reason: String },
    /// A file of a run cannot be read, or is not as it was written.
    #[error("{reason}")]
    File { reason: String },
}

impl From<HashesError> for DiffError {
    fn from(error: HashesError) -> Self {
        DiffError::File { reason: error.to_string() }
    }
}
