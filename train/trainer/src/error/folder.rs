//! Errors about run folders.

use std::path::{Path, PathBuf};

use kiln_sys::files;

/// Reasons why a run folder cannot be used. Paths are those of the run folder unless stated otherwise.
#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    /// The path is a file.
    #[error("--out {} is a file: name a folder for the run", .0.display())]
    File(PathBuf),
    /// The folder has content that no run has written, such as the named file.
    #[error(
        "{} is not empty and holds no run of Kiln (it has {}), so nothing was written: name a new or empty \
         folder with --out",
        .0.display(), .1
    )]
    Foreign(PathBuf, String),
    /// The folder already holds a run, and this start does not resume it.
    #[error(
        "{run} already holds a run: continue it with --resume {run}, choose another folder with --out, or remove it",
        run = .0.display()
    )]
    Occupied(PathBuf),
    /// The folder holds a run without a checkpoint, which this start may not begin again, for this reason.
    #[error(
        "{} holds a run without a complete checkpoint, {}, or choose another folder with --out", .0.display(), .1
    )]
    Unsaved(PathBuf, &'static str),
    /// The path `out` is a dangling symbolic `link`, or lies below one.
    #[error(
        "--out {}: {} is a link to {}, which is not there: create that folder, or name another one",
        .out.display(), .link.display(), .target.display()
    )]
    Dangling { out: PathBuf, link: PathBuf, target: PathBuf },
    /// The folder holds a run that does not belong to this restarted job, for the given reason.
    #[error(
        "{} already holds a run, and this restart does not take it over: {}. To continue that run, use \
         --resume latest; otherwise choose another folder with --out",
        .0.display(), .1
    )]
    OtherJob(PathBuf, &'static str),
    /// The folder is not the one that this job wrote to before it was restarted.
    #[error(
        "{} is not the folder that this job wrote to before its restart: that folder was moved, removed or \
         replaced. Put it back, or start a new job, with --resume and one of the folder's checkpoints to \
         continue from there",
        .0.display()
    )]
    NotTheSame(PathBuf),
    /// Another run is active in the folder; the text describes its process.
    #[error(
        "{} is in use by {}: wait until it ends or stop it, or choose another folder with --out",
        .0.display(), .1
    )]
    Held(PathBuf, String),
    /// The file `run.json` at this path is invalid; the text gives the reason and the remedy.
    #[error("{} {}", .0.display(), .1)]
    Identity(PathBuf, String),
    /// A file of the run folder cannot be read or written.
    #[error(
        "cannot {operation} {}: {source}; {}",
        .path.display(), files::limit_of(.source).unwrap_or("choose another folder with --out")
    )]
    Io { operation: &'static str, path: PathBuf, source: std::io::Error },
}

impl FolderError {
    pub fn io(operation: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        move |source| FolderError::Io { operation, path: path.to_owned(), source }
    }

    /// Returns whether the user's arguments caused this error.
    pub fn is_usage(&self) -> bool {
        !matches!(self, FolderError::Io { .. })
    }
}
