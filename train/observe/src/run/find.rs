//! Which folders are runs.

use std::fs;
use std::path::{Path, PathBuf};

use super::error::RunError;

/// Files one of which every run folder has. `run.json` is the first that a run writes.
const MARKS: [&str; 3] = ["run.json", "metrics.jsonl", "config.toml"];

/// Whether the folder is that of a run.
pub(super) fn is_run(path: &Path) -> bool {
    MARKS.iter().any(|mark| path.join(mark).is_file())
}

/// The run folders that `paths` name: each is one, or a folder of some. In the order of their names, each once.
///
/// # Errors
///
/// For a path that is neither.
pub fn find_runs(paths: &[PathBuf]) -> Result<Vec<PathBuf>, RunError> {
    let mut runs = Vec::new();
    for path in paths {
        let found = match is_run(path) {
            true => vec![path.clone()],
            false => runs_in(path)?,
        };
        runs.extend(found.into_iter().filter(|run| !runs.contains(run)).collect::<Vec<_>>());
    }
    Ok(runs)
}

fn runs_in(path: &Path) -> Result<Vec<PathBuf>, RunError> {
    let no_run = |why: &str| RunError::NoRun { path: path.to_owned(), why: why.to_owned() };
    if !path.exists() {
        return Err(no_run("it is not there"));
    }
    if !path.is_dir() {
        return Err(no_run("it is a file"));
    }
    let entries = fs::read_dir(path).map_err(|source| RunError::Io { path: path.to_owned(), source })?;
    let mut runs: Vec<PathBuf> =
        entries.flatten().map(|entry| entry.path()).filter(|run| is_run(run)).collect();
    runs.sort();
    match runs.is_empty() {
        true => Err(no_run("it has no run.json, and no folder in it has")),
        false => Ok(runs),
    }
}
