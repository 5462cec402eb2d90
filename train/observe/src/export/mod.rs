//! Exports metrics of runs as CSV or as event files of TensorBoard. An incomplete last line is left out.

mod csv;
mod error;
mod events;
mod folder;
mod run;

pub use csv::csv;
pub use error::ExportError;
pub use events::tensorboard;

#[cfg(test)]
mod tests;
