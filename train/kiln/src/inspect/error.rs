//! Errors of `kiln inspect`.

use std::path::PathBuf;

/// An error of `kiln inspect`.
#[derive(Debug, thiserror::Error)]
pub enum InspectError {
    /// A checkpoint is damaged.
    #[error(
        "{folder} is damaged:{}",
        .problems.iter().map(|problem| format!("\n  - {problem}")).collect::<String>()
    )]
    Damaged { folder: String, problems: Vec<String> },
    /// No usable file was found. `folder`: the folder that was searched; `skipped`: the files found there,
    /// and the problem of each.
    #[error(
        "no flight recorders in {}{}: name the folder of a run that failed, or its folder flight/",
        .folder.display(),
        .skipped.iter().map(|reason| format!(" ({reason})")).collect::<String>()
    )]
    Nothing { folder: PathBuf, skipped: Vec<String> },
}
