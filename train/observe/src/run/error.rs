//! Why a folder cannot be read as a run.

use std::io;
use std::path::PathBuf;

/// A folder that is no run, or cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// Nothing of a run is there.
    #[error(
        "{} is not the folder of a run: {why}; name the one that --out has named, or a folder with such folders",
        .path.display()
    )]
    NoRun {
        /// The folder.
        path: PathBuf,
        /// What is there instead.
        why: String,
    },
    /// The file system refuses.
    #[error("cannot read {}: {source}", .path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}
