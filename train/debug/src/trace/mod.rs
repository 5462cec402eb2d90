//! `kiln train --trace` and `kiln trace`: a few steps of all ranks in one file for Perfetto.

mod command;
mod options;
mod tracer;

pub use command::{TraceArgs, TraceCommand};
pub use options::{TraceOptions, TraceOptionsError};
pub(super) use tracer::Tracer;
