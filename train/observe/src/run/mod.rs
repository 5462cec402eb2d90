//! The contents of a run folder, for programs that show them: configuration, metrics, samples, events.
//!
//! A folder is read as far as possible: lines that are incomplete, or that another build has written, are
//! skipped and counted. This module never waits for the run, locks anything or writes.

mod error;
mod find;
mod folder;
mod metrics;
mod series;
mod tail;

pub use error::RunError;
pub use find::{find_runs, run_of_file};
pub(crate) use folder::distinct_names;
pub use folder::{Event, Run, Sample};
pub use metrics::Metrics;
pub use series::Series;
