//! `kiln metrics`: writes the metrics of runs in formats that other programs read.

use std::path::{Path, PathBuf};

use clap::Args;
use kiln_observe::export::{self, ExportError};

use crate::error::{CommandError, Result};
use kiln_train::TrainError;
use kiln_train::named;

/// Arguments of `kiln metrics`.
#[derive(Args, Clone, Debug)]
pub struct MetricsArgs {
    /// Run folders, or folders with run folders.
    #[arg(required = true, value_name = "RUN")]
    runs: Vec<PathBuf>,
    #[command(flatten)]
    form: Form,
}

#[derive(Args, Clone, Debug)]
#[group(required = true, multiple = false)]
struct Form {
    /// A table with a row for each step and a column for each key, to FILE or to standard output.
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    csv: Option<PathBuf>,
    /// Event files of TensorBoard in DIR, in a folder for each run.
    #[arg(long, value_name = "DIR")]
    tensorboard: Option<PathBuf>,
}

impl MetricsArgs {
    /// Exports the metrics; returns a message for the user.
    pub fn run(self) -> Result<String> {
        let MetricsArgs { runs, form } = self;
        let runs = kiln_observe::run::find_runs(&runs).map_err(ExportError::from)?;
        let folders = match form {
            Form { tensorboard: Some(out), .. } => export::tensorboard(&runs, &out)?,
            // The argument parser requires one of the two.
            Form { csv, .. } => return table(&runs, csv.as_deref().unwrap_or(Path::new("-"))),
        };
        let lines: Vec<_> =
            folders.iter().map(|folder| format!("exported to {}", folder.display())).collect();
        Ok(lines.join("\n"))
    }
}

/// Writes the metrics of `runs` to the file `to`, or returns them if they are to be printed.
fn table(runs: &[PathBuf], to: &Path) -> Result<String> {
    let mut table = export::csv(runs)?;
    if to == Path::new("-") || named::is_standard_output(to) {
        table.truncate(table.trim_end().len());
        return Ok(table);
    }
    // The first line of a file that may be replaced: the names of the columns.
    let is_table =
        |start: &[u8]| [&b"step,time"[..], b"run,step,time"].iter().any(|head| start.starts_with(head));
    named::write(to, table.as_bytes(), "table of `kiln metrics`", is_table)?;
    Ok(format!("exported to {}", to.display()))
}

impl From<ExportError> for CommandError {
    fn from(error: ExportError) -> Self {
        match error {
            ExportError::Io { doing, path, source } => TrainError::io(doing, &path)(source).into(),
            error => CommandError::usage(error.to_string()),
        }
    }
}
