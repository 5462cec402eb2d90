//! Errors of debugging commands.

use std::path::PathBuf;

use kiln_checkpoint::CheckpointError;
use kiln_config::ConfigError;
use kiln_data::DataError;
use kiln_train::TrainError;

use crate::hash::HashesError;

/// The result of a debugging command.
pub type Result<T, E = DebugError> = std::result::Result<T, E>;

/// An error of a debugging command.
#[derive(Debug, thiserror::Error)]
pub enum DebugError {
    /// A run failed, or its files cannot be read.
    #[error(transparent)]
    Train(#[from] TrainError),
    /// The two sides of a comparison cannot be compared.
    #[error(transparent)]
    Diff(#[from] DiffError),
}

impl DebugError {
    /// Creates an error about a mistake in the arguments.
    pub fn usage(problem: impl Into<String>) -> Self {
        TrainError::usage(problem).into()
    }

    /// Returns whether the user's configuration or arguments are the cause.
    pub fn is_usage(&self) -> bool {
        match self {
            DebugError::Train(error) => error.is_usage(),
            DebugError::Diff(_) => true,
        }
    }

    /// Returns whether nothing went wrong: a stop was requested.
    pub fn is_stop(&self) -> bool {
        matches!(self, DebugError::Train(error) if error.is_stop())
    }
}

macro_rules! through_train_error {
    ($($error:ty),*) => {
        $(impl From<$error> for DebugError {
            fn from(error: $error) -> Self {
                TrainError::from(error).into()
            }
        })*
    };
}

through_train_error!(ConfigError, CheckpointError, DataError);

/// An error that prevents a comparison.
#[derive(Debug, thiserror::Error)]
pub enum DiffError {
    /// The path does not exist.
    #[error("{} does not exist: name a run folder, a checkpoint, or a file of a run", .path.display())]
    Missing { path: PathBuf },
    /// The path exists but is not something that can be compared.
    #[error(
        "{} cannot be compared: name a run folder, a checkpoint, a Hugging Face folder, prepared \
         data, a configuration (.toml), or the metrics or hashes of a run (.jsonl)",
        .path.display()
    )]
    Unknown { path: PathBuf },
    /// The two sides have nothing in common.
    #[error("{what}: they have nothing in common to compare")]
    Nothing { what: String },
    /// The two sides are of the same kind, but have no part in common.
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
