//! Errors of reading and writing traces.

use std::io;
use std::path::PathBuf;

/// The reason why a trace file cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// A file operation failed.
    #[error("cannot {doing} {}: {source}", .path.display())]
    Io {
        /// The attempted operation: read or write.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file is not in Perfetto's format.
    #[error("{} is no Perfetto trace: {why}; `kiln train --trace steps=10-12` writes one", .path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// A description of the problem.
        why: String,
    },
    /// The file is a trace of another program, or is empty.
    #[error(
        "{} has no step of a run of Kiln; `kiln train --trace steps=10-12` writes a trace that has",
        .path.display()
    )]
    Foreign {
        /// The file.
        path: PathBuf,
    },
}
