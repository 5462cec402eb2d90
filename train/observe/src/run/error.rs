//! Errors of reading a folder as a run.

use std::io;
use std::path::PathBuf;

/// The reason why a folder cannot be read as a run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The folder contains no files of a run.
    #[error(
        "{} is not the folder of a run: {why}; name the one that --out has named, or a folder with such folders",
        .path.display()
    )]
    NoRun {
        /// The folder.
        path: PathBuf,
        /// A description of the actual content.
        why: String,
    },
    /// A file operation failed.
    #[error("cannot read {}: {source}", .path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}
