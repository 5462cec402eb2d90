//! `kiln diff` and `kiln bisect`: find where two runs diverge, and the key responsible.

mod bisect;
mod cause;
mod command;
mod compare;
mod difference;
mod hashes;
mod keys;
mod report;
mod subject;
mod trial;
mod values;

pub use crate::error::DiffError;
pub use bisect::BisectArgs;
pub use command::DiffArgs;
