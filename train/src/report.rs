//! `kiln report`: pages about runs.

use std::path::{Path, PathBuf};

use clap::Args;
use kiln_observe::report::{self, Document};
use kiln_observe::run::{Run, find_runs};

use crate::error::{Result, TrainError};
use crate::version::version;

/// Arguments of `kiln report`.
#[derive(Args)]
pub(crate) struct ReportArgs {
    /// Folders of runs, or folders of such folders.
    #[arg(required = true, value_name = "RUN")]
    runs: Vec<PathBuf>,
    /// New or empty folder for report.html, report.md and the plots.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

impl ReportArgs {
    /// Writes the report; returns what to say.
    pub(crate) fn run(self) -> Result<String> {
        check_place(&self.out, "--out")?;
        let folders = find_runs(&self.runs).map_err(|error| TrainError::usage(error.to_string()))?;
        let runs: std::result::Result<Vec<_>, _> = folders.iter().map(|folder| Run::open(folder)).collect();
        let runs = runs.map_err(|error| TrainError::usage(error.to_string()))?;
        write(&report::of_runs(&runs, version()), &self.out, "--out")
    }
}

/// Fails unless a report can come to the place that `flag` names.
pub(crate) fn check_place(place: &Path, flag: &'static str) -> Result<()> {
    report::check_place(place, flag).map_err(|error| TrainError::usage(error.to_string()))
}

/// Writes `document` to the place that `flag` names; returns what to say.
pub(crate) fn write(document: &Document, place: &Path, flag: &'static str) -> Result<String> {
    report::write(document, place, flag).map_err(|error| TrainError::usage(error.to_string()))?;
    let page = |name: &str| place.join(name).display().to_string();
    Ok(format!("the report is in {} and {}", page("report.html"), page("report.md")))
}
