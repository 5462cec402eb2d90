//! Errors of launching ranks.

use std::path::PathBuf;

use crate::place::EnvError;

/// The reason why ranks could not be launched.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The program cannot be started.
    #[error("cannot start {}: {source}; check that the file exists and may be executed", .program.display())]
    Start { program: PathBuf, source: std::io::Error },
    /// A log cannot be written.
    #[error("cannot write {}: {source}; choose another folder with --log-dir", .path.display())]
    Log { path: PathBuf, source: std::io::Error },
    /// The system refuses another required operation.
    #[error("cannot {what}: {source}")]
    System { what: &'static str, source: std::io::Error },
}

/// The reason why a launch failed.
#[derive(Debug, thiserror::Error)]
pub enum LaunchArgsError {
    /// The place of this node is invalid.
    #[error(transparent)]
    Env(#[from] EnvError),
    /// The arguments are invalid.
    #[error("{0}")]
    Arguments(String),
    /// The launch itself failed.
    #[error(transparent)]
    Launch(#[from] LaunchError),
}

impl LaunchArgsError {
    /// Returns whether the user's arguments or environment are the cause.
    pub fn is_usage(&self) -> bool {
        !matches!(self, LaunchArgsError::Launch(_))
    }
}
