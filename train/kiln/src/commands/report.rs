//! `kiln report`: writes an HTML report about runs.

use std::path::{Path, PathBuf};

use clap::Args;
use kiln_observe::report::{self, Report, ReportError};
use kiln_observe::run::find_runs;

use crate::commands::status::look_at_runs;
use crate::commands::watch::timelines_at_runs;
use crate::error::{CommandError, Result};
use crate::version::version;

/// Arguments of `kiln report`.
#[derive(Args)]
pub(crate) struct ReportArgs {
    /// Folders of runs, or folders of such folders.
    #[arg(required = true, value_name = "RUN")]
    runs: Vec<PathBuf>,
    /// New or empty folder for report.html and its curves as SVG.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

impl ReportArgs {
    pub(crate) fn run(self) -> Result<String> {
        check_place(&self.out, "--out")?;
        // A path without a run is an error here; `kiln watch` would wait for the run.
        let runs = find_runs(&self.runs).map_err(|error| CommandError::usage(error.to_string()))?;
        write(
            Report::from_runs(runs, look_at_runs(), Some(timelines_at_runs()), version()),
            &self.out,
            "--out",
        )
    }
}

pub(crate) fn check_place(place: &Path, flag: &'static str) -> Result<()> {
    report::check_place(place, flag).map_err(|error| CommandError::usage(error.to_string()))
}

/// Writes `report` to the place that `flag` names; returns a message for the user.
pub(crate) fn write(
    report: std::result::Result<Report, ReportError>,
    place: &Path,
    flag: &'static str,
) -> Result<String> {
    let written = report.and_then(|report| report.write(place, flag));
    written.map_err(|error| CommandError::usage(error.to_string()))?;
    Ok(format!("the report is in {}", place.join("report.html").display()))
}
