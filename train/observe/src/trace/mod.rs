//! Traces: some steps of all ranks in a file for [Perfetto](https://ui.perfetto.dev), and summaries of traces.

mod align;
mod assemble;
mod model;
mod proto;
mod read;
mod summary;
#[cfg(test)]
mod tests;
mod write;

use std::io;
use std::path::PathBuf;

pub use assemble::{GpuActivity, RecordedRank, RecordedStep};
pub use model::{CollectiveTrace, GpuTrace, RankTrace, SpanTrace, StepTrace, Trace};
pub use summary::{
    GpuSummary, KernelSummary, OperationSummary, PathPart, RankSummary, Slowest, StepSummary, Summary,
    UnitWait, WorkDifference,
};

/// The reason why a trace file cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// A file operation failed.
    #[error("cannot {doing} {}: {source}", .path.display())]
    Io {
        /// The attempted operation.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file is not in Perfetto's format.
    #[error("{} is not a Perfetto trace: {why}; `kiln train --trace steps=10-12` writes one", .path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// A description of the problem.
        why: String,
    },
    /// The file is a trace of another program, or is empty.
    #[error(
        "{} contains no step of a Kiln run; write a trace with `kiln train --trace steps=10-12`",
        .0.display()
    )]
    Foreign(PathBuf),
}
