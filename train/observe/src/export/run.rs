//! A run, as far as it is exported.

use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use kiln_storage::files;
use toml::Table;

use super::error::ExportError;
use crate::line::{Line, lines_of};
use crate::run::{Run, Sample};

/// What is exported of a run.
pub(super) struct Exported {
    /// The name of its folder.
    pub(super) name: String,
    /// What no other run has, of letters and digits: of `run.json`, or of the name where there is none.
    pub(super) id: String,
    /// Its resolved configuration; empty if it cannot be read.
    pub(super) config: Table,
    /// Its metrics. There is one line at least.
    pub(super) lines: Vec<Line>,
    /// Texts that it has generated.
    pub(super) samples: Vec<Sample>,
    /// When `metrics.jsonl` was written last, in seconds since 1970: lines of older builds do not say when they
    /// were written.
    pub(super) written: f64,
}

impl Exported {
    pub(super) fn read(folder: &Path) -> Result<Exported, ExportError> {
        let run = Run::open(folder)?;
        let path = folder.join("metrics.jsonl");
        let empty = |why| ExportError::Empty(folder.to_owned(), why);
        let text = match files::read(&path, u64::MAX) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(empty("there is no metrics.jsonl in it"));
            }
            text => text.map_err(ExportError::io("read", &path))?,
        };
        let lines = lines_of(&text);
        if lines.is_empty() {
            return Err(empty("no line of its metrics.jsonl is one"));
        }
        let config = files::read(&folder.join("config.toml"), files::MAX_WHOLE).unwrap_or_default();
        let written = std::fs::metadata(&path).and_then(|file| file.modified()).ok();
        let written = written.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        Ok(Exported {
            id: id(folder, run.name()),
            name: run.name().to_owned(),
            config: std::str::from_utf8(&config).ok().and_then(|text| text.parse().ok()).unwrap_or_default(),
            lines,
            samples: run.samples().to_vec(),
            written: written.map_or(0.0, |time| time.as_secs_f64()),
        })
    }

    /// The time of the line at `index`, or of the next one that says when it was written.
    pub(super) fn time(&self, index: usize) -> f64 {
        self.lines[index..].iter().find_map(|line| line.time).unwrap_or(self.written)
    }
}

/// What tells a run from others.
fn id(folder: &Path, name: &str) -> String {
    let read = || -> Option<String> {
        let text = files::read(&folder.join("run.json"), files::MAX_WHOLE).ok()?;
        let run: serde_json::Value = serde_json::from_slice(&text).ok()?;
        Some(run.get("id")?.as_str()?.to_owned())
    };
    let id: String =
        read().unwrap_or_default().chars().filter(char::is_ascii_alphanumeric).take(64).collect();
    match id.is_empty() {
        false => id,
        // No letters of the name are lost.
        true => name.bytes().map(|byte| format!("{byte:02x}")).collect(),
    }
}

/// Reads the runs in `folders`, and hands each to `export`.
pub(super) fn each(
    folders: &[PathBuf],
    mut export: impl FnMut(Exported) -> Result<PathBuf, ExportError>,
) -> Result<Vec<PathBuf>, ExportError> {
    folders.iter().map(|folder| export(Exported::read(folder)?)).collect()
}
