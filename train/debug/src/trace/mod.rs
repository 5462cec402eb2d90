//! `kiln train --trace` and `kiln trace`: a few steps of all ranks in one file for Perfetto.

mod options;
mod tracer;

pub use options::{TraceOptions, TraceOptionsError};
pub(super) use tracer::Tracer;

use std::path::PathBuf;

use clap::{Args, Subcommand};
use kiln_observe::trace::{Summary, Trace};

use kiln_train::error::{Result, TrainError};
use kiln_train::process::output::printable;

/// Arguments of `kiln trace`.
#[derive(Args, Clone, Debug)]
pub struct TraceArgs {
    #[command(subcommand)]
    command: TraceCommand,
}

/// A command on a trace.
#[derive(Subcommand, Clone, Debug)]
pub enum TraceCommand {
    /// Summarize each step: critical path, waits, and the slowest rank with its cause.
    Summary {
        /// File written by `kiln train --trace`.
        file: PathBuf,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
}

impl TraceArgs {
    /// Returns the text to print.
    ///
    /// # Errors
    ///
    /// If the file is not a trace of a run.
    pub fn run(&self) -> Result<String> {
        let TraceCommand::Summary { file, json } = &self.command;
        let trace = Trace::open(file).map_err(|error| TrainError::usage(error.to_string()))?;
        let summary = Summary::of(&trace);
        match json {
            true => serde_json::to_string(&summary).map_err(|error| TrainError::usage(error.to_string())),
            false => Ok(printable(&summary.to_string()).to_string()),
        }
    }
}
