//! Why metrics cannot be exported.

use std::io;
use std::path::{Path, PathBuf};

use crate::run::RunError;

/// Metrics that cannot be exported.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// Not a run, or it cannot be read.
    #[error(transparent)]
    Run(#[from] RunError),
    /// There is no line of metrics yet.
    #[error("{} has no metrics yet: {}", .0.display(), .1)]
    Empty(PathBuf, &'static str),
    /// What would be written is there.
    #[error("{} is there already: remove it, or choose another folder", .0.display())]
    Taken(PathBuf),
    /// The file system refuses.
    #[error("cannot {doing} {}: {source}; {}", .path.display(), kiln_storage::files::advice(.source))]
    Io {
        /// What was done with it.
        doing: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl ExportError {
    /// What makes an error of one of the file system while `doing` something with `path`.
    pub(super) fn io(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ExportError {
        let path = path.to_owned();
        move |source| ExportError::Io { doing, path, source }
    }
}
