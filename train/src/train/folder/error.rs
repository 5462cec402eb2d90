//! Why a run folder cannot be used.

use std::path::{Path, PathBuf};

use crate::files;

/// Why a run folder cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    /// The path is a file.
    #[error("--out {} is a file: name a folder for the run", .out.display())]
    File {
        /// The path.
        out: PathBuf,
    },
    /// The folder has content, and no run has written it.
    #[error(
        "{} is not empty and holds no run of Kiln (it has {example}), so nothing was written: name a new or empty folder with --out",
        .out.display()
    )]
    Foreign {
        /// The folder.
        out: PathBuf,
        /// One of the names in it.
        example: String,
    },
    /// The folder holds another run.
    #[error("{} already holds a run: go on with --resume latest, choose another folder with --out, or remove it", .out.display())]
    Occupied {
        /// The run folder.
        out: PathBuf,
    },
    /// The folder holds a run that has nothing to go on from, and this start is none of it.
    #[error("{} holds a run without a complete checkpoint, {why}: choose another folder with --out", .out.display())]
    Unsaved {
        /// The run folder.
        out: PathBuf,
        /// Why this start is none of it, and what would be.
        why: &'static str,
    },
    /// The path is a link to nothing, or below one.
    #[error("--out {}: {} is a link to {}, which is not there: create that folder, or name another one", .out.display(), .link.display(), .target.display())]
    Dangling {
        /// The path.
        out: PathBuf,
        /// The link.
        link: PathBuf,
        /// Where it leads.
        target: PathBuf,
    },
    /// A job that was started again may only go on with its own run.
    #[error(
        "{} already holds a run, and this restart does not take it over: {why}. If it is the run that you mean, go on with --resume latest; if not, choose another folder with --out",
        .out.display()
    )]
    OtherJob {
        /// The run folder.
        out: PathBuf,
        /// What differs.
        why: &'static str,
    },
    /// A job that was started again does not find the folder that it was writing to.
    #[error(
        "{} is not the folder that this job was writing to before it was started again: that one was moved, removed or replaced meanwhile. Put it back, or start the job anew, with --resume and one of its checkpoints to go on from there",
        .out.display()
    )]
    NotTheSame {
        /// The run folder.
        out: PathBuf,
    },
    /// Another run is going on in the folder.
    #[error("{} is in use by {holder}: wait for its end or end it, or choose another folder with --out", .out.display())]
    Held {
        /// The run folder.
        out: PathBuf,
        /// Who holds it, and since when.
        holder: String,
    },
    /// `run.json` cannot be understood.
    #[error("{} {problem}", .path.display())]
    Identity {
        /// The file.
        path: PathBuf,
        /// What is wrong with it, and what to do.
        problem: String,
    },
    /// A file of the run folder cannot be read or written.
    #[error(
        "cannot {operation} {}: {source}; {}",
        .path.display(),
        files::limit_of(.source).unwrap_or("choose another folder with --out")
    )]
    Io {
        /// What was tried.
        operation: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
}

impl FolderError {
    pub(super) fn io(operation: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        move |source| FolderError::Io { operation, path: path.to_owned(), source }
    }

    /// Whether the user's arguments are the cause.
    pub fn is_usage(&self) -> bool {
        !matches!(self, FolderError::Io { .. })
    }
}
