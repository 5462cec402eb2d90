//! Traces: a few steps of all ranks in a file for [Perfetto](https://ui.perfetto.dev), and summaries of such
//! files.
//!
//! Ranks provide their recordings ([`RecordedRank`]); [`Trace::of_ranks`] puts them on one clock,
//! [`Trace::write`] writes a file, [`Trace::open`] reads it back, and [`Summary`] reports where the time
//! went.

mod align;
mod assemble;
mod calls;
mod error;
mod intern;
mod model;
mod names;
mod proto;
mod read;
mod summary;
#[cfg(test)]
mod tests;
mod write;

pub use assemble::{GpuActivity, RecordedRank, RecordedStep};
pub use error::TraceError;
pub use model::{CollectiveTrace, GpuTrace, RankTrace, SpanTrace, StepTrace, Trace};
pub use summary::{
    GpuSummary, KernelSummary, OperationSummary, PathPart, RankSummary, Slowest, StepSummary, Summary,
    UnitWait, WorkDifference,
};
