//! `kiln diff` and `kiln bisect`: where two runs part, and which key makes them.
//!
//! - `subject`: what a path leads to;
//! - `difference`: a place in which two things differ, and whether rounding explains it;
//! - `hashes`, `values`: hashes step by step; metrics, weights, data;
//! - `keys`: in which keys two configurations differ, and what these can change; `cause`: why two runs part;
//! - `compare`: all of it, for `report`;
//! - `trial`: a few steps of a configuration; `command`, `bisect`: the commands.

mod bisect;
mod cause;
mod command;
mod compare;
mod difference;
mod error;
mod hashes;
mod keys;
mod report;
mod subject;
mod trial;
mod values;

pub(crate) use bisect::BisectArgs;
pub(crate) use command::DiffArgs;
pub use error::DiffError;
