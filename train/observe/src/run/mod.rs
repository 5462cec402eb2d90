//! What is in a run folder, for whoever draws it: configuration, metrics, samples, events.
//!
//! A folder is read as far as it goes: a line that is not whole yet, or that some other build has written, is passed
//! over and counted. Nothing here waits for the run, locks anything or writes.

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
