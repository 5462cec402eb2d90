//! The contents of a run folder: configuration, metrics, samples and events.
//!
//! Invalid lines are skipped and counted. This module never writes, locks files or blocks the run.

mod find;
mod folder;
mod metrics;
mod tail;

use std::io;
use std::path::PathBuf;

pub use find::{find_runs, run_of_file};
pub(crate) use folder::distinct_names;
pub use folder::{Event, Run, Sample};
pub use metrics::{Metrics, Series};

/// The reason why a folder cannot be read as a run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The folder contains no files of a run.
    #[error("{} is not a run folder: {why}; pass the folder given as --out, or a folder of runs", .path.display())]
    NoRun {
        /// The path.
        path: PathBuf,
        /// A description of the problem.
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
