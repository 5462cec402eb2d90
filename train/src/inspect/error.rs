//! Why there is nothing to show.

use std::path::PathBuf;

/// Why there is nothing to show.
#[derive(Debug, thiserror::Error)]
pub enum InspectError {
    /// A checkpoint is not as it was written.
    #[error(
        "{folder} is damaged:{}",
        .problems.iter().map(|problem| format!("\n  - {problem}")).collect::<String>()
    )]
    Damaged { folder: String, problems: Vec<String> },
    /// No file could be read. `folder`: where they were looked for; `skipped`: files that were there, and
    /// what is wrong with them.
    #[error(
        "no flight recorders in {}{}: name the folder of a run that failed, or its folder flight/",
        .folder.display(),
        .skipped.iter().map(|reason| format!(" ({reason})")).collect::<String>()
    )]
    Nothing { folder: PathBuf, skipped: Vec<String> },
}
