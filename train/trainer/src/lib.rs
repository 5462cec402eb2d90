//! Trains a decoder: the run folder, the loop and its steps, evaluation, generation, and metrics.
//!
//! A program attaches tools that inspect a run, such as breakpoints, through [`run::Tools`].

pub mod batches;
pub mod command;
pub mod error;
pub mod eval;
pub mod fault;
pub mod flight;
pub mod generate;
pub mod kernels;
pub mod launch;
pub mod lines;
pub mod logged;
pub mod losses;
pub mod metrics;
pub mod named;
pub mod objective;
pub mod passes;
pub mod prepared;
pub mod process;
pub mod registry;
pub mod run;
pub mod values;
pub mod version;
pub mod world;

pub use error::{Result, TrainError};
