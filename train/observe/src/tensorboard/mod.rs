//! Event files, which TensorBoard shows: scalars of `metrics.jsonl`, histograms, texts, and the
//! configuration.
//!
//! - [`EventWriter`]: one event file;
//! - [`TensorBoard`]: the event files of a live run.

mod background;
mod cut;
mod event;
mod proto;
mod record;
mod tags;
mod writer;

pub use background::{TensorBoard, TensorBoardOptions};
pub use event::{Histogram, sample_tag};
pub use writer::EventWriter;

#[cfg(test)]
mod tests;
