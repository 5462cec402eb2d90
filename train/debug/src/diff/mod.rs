//! `kiln diff` and `kiln bisect`: find where two runs diverge, and the key responsible.
//!
//! - `subject`: what a path refers to;
//! - `difference`: a place in which two things differ, and whether rounding explains it;
//! - `hashes`, `values`: comparison of hashes step by step, and of metrics, weights and data;
//! - `keys`: the keys in which two configurations differ, and their effects; `cause`: the likely cause of a
//!   difference;
//! - `compare`: the whole comparison, as a `report`;
//! - `trial`: a few steps of a configuration; `command`, `bisect`: the commands.

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
