//! Metrics of runs in the forms of other programs: CSV, event files of TensorBoard, runs that Weights & Biases takes.
//!
//! What can be read of a run is exported: half a line at the end is left out.

mod csv;
mod error;
mod events;
mod folder;
mod leveldb;
mod run;
mod wandb;
mod wandb_proto;

pub use csv::csv;
pub use error::ExportError;
pub use events::tensorboard;
pub use wandb::wandb_offline;

#[cfg(test)]
mod tests;
