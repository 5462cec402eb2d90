//! Traces: a few steps of all ranks in a file for [Perfetto](https://ui.perfetto.dev), and what such a file tells.
//!
//! Ranks hand over what they have recorded ([`RecordedRank`]); [`Trace::of_ranks`] puts it on one clock,
//! [`Trace::write`] makes a file of it, [`Trace::open`] reads it back, and [`Summary`] says where the time went.

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
