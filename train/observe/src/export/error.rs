//! Errors of exporting metrics.

use std::io;
use std::path::{Path, PathBuf};

use crate::run::RunError;

/// The reason why metrics cannot be exported.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The folder is not a run, or cannot be read.
    #[error(transparent)]
    Run(#[from] RunError),
    /// There are no lines of metrics yet.
    #[error("{} has no metrics yet: {}", .0.display(), .1)]
    Empty(PathBuf, &'static str),
    /// The output already exists.
    #[error("{} is there already: remove it, or choose another folder", .0.display())]
    Taken(PathBuf),
    /// A file operation failed.
    #[error("cannot {doing} {}: {source}; {}", .path.display(), kiln_sys::files::advice(.source))]
    Io {
        /// The attempted operation.
        doing: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

impl ExportError {
    /// Returns a closure that turns an I/O error into one that names the operation `doing` and `path`.
    pub(super) fn io(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ExportError {
        let path = path.to_owned();
        move |source| ExportError::Io { doing, path, source }
    }
}
