//! The contents of a run folder, for programs that show them: configuration, metrics, samples, events.
//!
//! A folder is read as far as possible: lines that are incomplete, or that another build has written, are
//! skipped and counted. This module never waits for the run, locks anything or writes.

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
