//! Event files for TensorBoard: scalars of `metrics.jsonl`, histograms, texts and the configuration.

mod background;
pub(crate) mod event;
mod proto;
mod writer;

pub use background::{TensorBoard, TensorBoardOptions};
pub use event::{Histogram, sample_tag};
pub(crate) use writer::EventWriter;

#[cfg(test)]
mod tests;
