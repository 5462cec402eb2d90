//! Exports metrics as CSV or as TensorBoard event files.

mod csv;
mod events;
#[cfg(test)]
mod tests;

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use kiln_sys::{LineReader, files};
use toml::Table;

pub use csv::{cell, csv};
pub use events::tensorboard;

use crate::line::{Line, lines_of};
use crate::run::{Run, RunError, Sample, distinct_names};

/// The reason why metrics cannot be exported.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The folder is not a run, or cannot be read.
    #[error(transparent)]
    Run(#[from] RunError),
    /// The run has no metrics yet.
    #[error("{} has no metrics yet: {}", .0.display(), .1)]
    Empty(PathBuf, &'static str),
    /// The output already exists.
    #[error("{} already exists: remove it, or choose another folder", .0.display())]
    Taken(PathBuf),
    /// A file operation failed.
    #[error("cannot {doing} {}: {source}; {}", .path.display(), files::advice(.source))]
    Io {
        /// The attempted operation.
        doing: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

impl ExportError {
    fn io(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ExportError {
        let path = path.to_owned();
        move |source| ExportError::Io { doing, path, source }
    }
}

struct Exported {
    /// Name of the run's folder, or its path if another exported run has the same name.
    name: String,
    /// Resolved configuration; empty if it cannot be read.
    config: Table,
    lines: Vec<Line>,
    /// Time of each line, in seconds since 1970.
    times: Vec<f64>,
    samples: Vec<Sample>,
}

impl Exported {
    fn read(folder: &Path, name: String) -> Result<Exported, ExportError> {
        let run = Run::open(folder)?;
        let path = folder.join("metrics.jsonl");
        let lines = match LineReader::open(&path).and_then(lines_of) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(ExportError::Empty(folder.to_owned(), "it has no metrics.jsonl"));
            }
            lines => lines.map_err(ExportError::io("read", &path))?,
        };
        if lines.is_empty() {
            return Err(ExportError::Empty(folder.to_owned(), "its metrics.jsonl has no valid line"));
        }
        let config = files::read(&folder.join("config.toml"), files::MAX_WHOLE).unwrap_or_default();
        let config = std::str::from_utf8(&config).ok().and_then(|text| text.parse().ok()).unwrap_or_default();
        // Lines of older builds have no time. They get the next line's time, or the file's.
        let modified = std::fs::metadata(&path).and_then(|file| file.modified()).ok();
        let modified = modified.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        let mut next = modified.map_or(0.0, |time| time.as_secs_f64());
        let time = |line: &Line| {
            next = line.time.unwrap_or(next);
            next
        };
        let mut times: Vec<f64> = lines.iter().rev().map(time).collect();
        times.reverse();
        Ok(Exported { name, config, lines, times, samples: run.samples().to_vec() })
    }
}

fn runs(folders: &[PathBuf]) -> impl Iterator<Item = Result<Exported, ExportError>> {
    let names = distinct_names(folders.iter().map(PathBuf::as_path));
    folders.iter().zip(names).map(|(folder, name)| Exported::read(folder, name))
}
