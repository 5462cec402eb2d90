//! Exports metrics of runs as CSV or as TensorBoard event files. An incomplete last line is omitted.

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
