//! Why there is no report.

use std::io;
use std::path::PathBuf;

/// Why a report was not written.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// Something is there already.
    #[error(
        "{} is there already and is not empty; nothing is overwritten: name a new folder with {flag} DIR, or \
         remove that one",
        .path.display()
    )]
    Exists {
        /// The place.
        path: PathBuf,
        /// The flag that named it.
        flag: &'static str,
    },
    /// The file system refuses.
    #[error("cannot write the report {}: {source}", .path.display())]
    Io {
        /// The place.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}
