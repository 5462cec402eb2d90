//! Why ranks cannot be launched.

use std::path::PathBuf;

use crate::place::EnvError;

/// Why ranks could not be launched.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The program does not start.
    #[error("cannot start {}: {source}; check that the file exists and may be executed", .program.display())]
    Start { program: PathBuf, source: std::io::Error },
    /// A log cannot be written.
    #[error("cannot write {}: {source}; choose another folder with --log-dir", .path.display())]
    Log { path: PathBuf, source: std::io::Error },
    /// The system refuses something else that is needed.
    #[error("cannot {what}: {source}")]
    System { what: &'static str, source: std::io::Error },
}

/// Why a launch did not come to an end of its own.
#[derive(Debug, thiserror::Error)]
pub enum LaunchArgsError {
    /// The place of this node.
    #[error(transparent)]
    Env(#[from] EnvError),
    /// The arguments.
    #[error("{0}")]
    Arguments(String),
    /// The launch.
    #[error(transparent)]
    Launch(#[from] LaunchError),
}

impl LaunchArgsError {
    /// Whether the user's arguments or environment are the cause.
    pub fn is_usage(&self) -> bool {
        !matches!(self, LaunchArgsError::Launch(_))
    }
}
