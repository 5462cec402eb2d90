//! Errors of commands.

use std::path::PathBuf;

use kiln_checkpoint::CheckpointError;
use kiln_config::ConfigError;
use kiln_config::device::DeviceError;
use kiln_config::links::LinksError;
use kiln_data::DataError;
use kiln_debug::DebugError;
use kiln_launch::LaunchArgsError;
use kiln_launch::place::EnvError;
use kiln_model::layers::LayerError;
use kiln_shard::ranks::RankError;
use kiln_train::TrainError;

/// The result of a command.
pub type Result<T, E = CommandError> = std::result::Result<T, E>;

/// An error of a command.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// A run failed, or one of its parts, such as the data or a checkpoint.
    #[error(transparent)]
    Train(#[from] TrainError),
    /// A debugging command failed.
    #[error(transparent)]
    Debug(#[from] DebugError),
    /// The inspected object is damaged or missing.
    #[error(transparent)]
    Inspect(#[from] InspectError),
}

impl CommandError {
    /// Creates an error about a mistake in the arguments.
    pub fn usage(problem: impl Into<String>) -> Self {
        TrainError::usage(problem).into()
    }

    /// Returns the wrapped error of a run, if this is one.
    pub fn train_error(&self) -> Option<&TrainError> {
        match self {
            CommandError::Train(error) | CommandError::Debug(DebugError::Train(error)) => Some(error),
            CommandError::Debug(DebugError::Diff(_)) | CommandError::Inspect(_) => None,
        }
    }

    /// Returns whether the user's configuration or arguments are the cause.
    pub fn is_usage(&self) -> bool {
        match self {
            CommandError::Debug(DebugError::Diff(_))
            | CommandError::Inspect(InspectError::Nothing { .. }) => true,
            other => other.train_error().is_some_and(TrainError::is_usage),
        }
    }

    /// Returns whether this is not a failure: the user stopped the command before there was anything to save.
    pub fn is_stop(&self) -> bool {
        self.train_error().is_some_and(TrainError::is_stop)
    }

    /// Returns whether the error only follows from the failure of another rank.
    pub fn is_consequence(&self) -> bool {
        self.train_error().is_some_and(TrainError::is_consequence)
    }
}

macro_rules! through_train_error {
    ($($error:ty),*) => {
        $(impl From<$error> for CommandError {
            fn from(error: $error) -> Self {
                TrainError::from(error).into()
            }
        })*
    };
}

through_train_error!(
    ConfigError,
    CheckpointError,
    DataError,
    LaunchArgsError,
    EnvError,
    LayerError,
    LinksError,
    DeviceError
);

/// An error of `kiln inspect`.
#[derive(Debug, thiserror::Error)]
pub enum InspectError {
    /// A checkpoint is damaged.
    #[error(
        "{folder} is damaged:{}",
        .problems.iter().map(|problem| format!("\n  - {problem}")).collect::<String>()
    )]
    Damaged { folder: String, problems: Vec<String> },
    /// No usable file in `folder`; `skipped` lists the files found there, and their problems.
    #[error(
        "no flight recorders in {}{}: name the folder of a run that failed, or its folder flight/",
        .folder.display(),
        .skipped.iter().map(|reason| format!(" ({reason})")).collect::<String>()
    )]
    Nothing { folder: PathBuf, skipped: Vec<String> },
}
