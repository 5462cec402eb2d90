//! Reports: one HTML page and one Markdown page about runs, or about what `kiln bench strategies` has measured.
//!
//! - [`Document`]: what a report says, before it is HTML or Markdown;
//! - `html`, `markdown`: how it is written, with everything that comes from files escaped;
//! - `facts`, `numbers`, `time`, `config`: what is known of a run;
//! - [`of_runs`], [`of_strategies`]: what a report of them says;
//! - [`write()`]: the folder, which is new or empty before.

mod chapters;
mod config;
mod document;
mod error;
mod facts;
mod html;
mod markdown;
mod numbers;
mod parallel;
mod remarks;
mod runs;
mod statistics;
mod strategies;
mod subject;
#[cfg(test)]
mod tests;
mod text;
mod time;
mod write;

pub use document::{Block, Cell, Document, Figure, Plot, Table};
pub use error::ReportError;
pub use runs::of_runs;
pub use strategies::{Strategies, StrategyRow, of_strategies};
pub use write::{check_place, write};
