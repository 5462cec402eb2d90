//! The exported data of a run.

use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use kiln_sys::{LineReader, files};
use toml::Table;

use super::error::ExportError;
use crate::line::{Line, lines_of};
use crate::run::{Run, Sample, distinct_names};

/// The exported data of a run.
pub(super) struct Exported {
    /// The name of its folder, or its path if another exported run has the same name.
    pub(super) name: String,
    /// Its resolved configuration; empty if it cannot be read.
    pub(super) config: Table,
    /// Its metrics: at least one line.
    pub(super) lines: Vec<Line>,
    /// Texts that it has generated.
    pub(super) samples: Vec<Sample>,
    /// Time at which each line was written, in seconds since 1970.
    times: Vec<f64>,
}

impl Exported {
    fn read(folder: &Path, name: String) -> Result<Exported, ExportError> {
        let run = Run::open(folder)?;
        let path = folder.join("metrics.jsonl");
        let empty = |why| ExportError::Empty(folder.to_owned(), why);
        let lines = match LineReader::open(&path).and_then(lines_of) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(empty("there is no metrics.jsonl in it"));
            }
            lines => lines.map_err(ExportError::io("read", &path))?,
        };
        if lines.is_empty() {
            return Err(empty("no line of its metrics.jsonl is one"));
        }
        let config = files::read(&folder.join("config.toml"), files::MAX_WHOLE).unwrap_or_default();
        let written = std::fs::metadata(&path).and_then(|file| file.modified()).ok();
        let written = written.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        Ok(Exported {
            name,
            config: std::str::from_utf8(&config).ok().and_then(|text| text.parse().ok()).unwrap_or_default(),
            times: times(&lines, written.map_or(0.0, |time| time.as_secs_f64())),
            lines,
            samples: run.samples().to_vec(),
        })
    }

    /// Returns the time of the line at `index`, or of the next line that records a time.
    pub(super) fn time(&self, index: usize) -> f64 {
        self.times[index]
    }
}

/// Returns the time of each line. Lines of older builds do not record a time: they get that of the next line
/// that does, or else `written`, the file's modification time.
fn times(lines: &[Line], written: f64) -> Vec<f64> {
    let mut next = written;
    let time = |line: &Line| {
        next = line.time.unwrap_or(next);
        next
    };
    let mut times: Vec<f64> = lines.iter().rev().map(time).collect();
    times.reverse();
    times
}

/// Returns the runs in `folders`; each is read only when the iterator reaches it.
pub(super) fn runs(folders: &[PathBuf]) -> impl Iterator<Item = Result<Exported, ExportError>> {
    let names = distinct_names(folders.iter().map(PathBuf::as_path));
    folders.iter().zip(names).map(|(folder, name)| Exported::read(folder, name))
}
