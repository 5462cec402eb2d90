//! Why a file cannot be read as a trace.

use std::io;
use std::path::PathBuf;

/// A trace file that cannot be read, or written.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file system refuses.
    #[error("cannot {doing} {}: {source}", .path.display())]
    Io {
        /// What was tried: read or write.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is not in Perfetto's format.
    #[error("{} is no Perfetto trace: {why}; `kiln train --trace steps=10-12` writes one", .path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// It is a trace of something else, or there is nothing in it.
    #[error(
        "{} has no step of a run of Kiln; `kiln train --trace steps=10-12` writes a trace that has",
        .path.display()
    )]
    Foreign {
        /// The file.
        path: PathBuf,
    },
}
