//! The command `kiln watch`.

use std::path::PathBuf;

use clap::Args;
use kiln_observe::watch::{self, WatchOptions};

use crate::debug::look_at_runs;
use crate::error::{Result, TrainError};

/// Arguments of `kiln watch`.
#[derive(Args, Clone, Debug)]
pub struct WatchArgs {
    /// Run folders, or folders of run folders. A run that begins later is shown when it is there.
    #[arg(required = true, value_name = "RUN")]
    runs: Vec<PathBuf>,
}

impl WatchArgs {
    /// Shows the runs until the user leaves.
    ///
    /// # Errors
    ///
    /// If there is no terminal.
    pub fn run(self) -> Result<()> {
        let options = WatchOptions::new(self.runs, look_at_runs());
        watch::run(options).map_err(|error| TrainError::usage(error.to_string()))
    }
}
