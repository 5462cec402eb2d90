//! Output files that users name.

use std::fs;
use std::io::{self, ErrorKind, stdout};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use kiln_observe::run::run_of_file;
use kiln_sys::durable::write_named;

use crate::error::{Result, TrainError};

/// Fails if `path` is a file that belongs to a run.
pub fn check(path: &Path) -> Result<()> {
    match run_of_file(path) {
        None => Ok(()),
        Some(run) => Err(TrainError::usage(format!(
            "{} belongs to the run in {}: name another file",
            path.display(),
            run.display()
        ))),
    }
}

/// Writes `content` to `path` as [`write_named`] does, but never to a file that belongs to a run.
///
/// # Errors
///
/// If `path` is a file of a run or a file that `is_of_kind` rejects, or on errors of the file system.
pub fn write(path: &Path, content: &[u8], kind: &str, is_of_kind: impl FnOnce(&[u8]) -> bool) -> Result<()> {
    check(path)?;
    write_named(path, content, kind, is_of_kind).map_err(refused("write", path))
}

/// Converts an error of [`write_named`] to a message that this program cannot `operation` `path`.
pub fn refused(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> TrainError {
    move |error| match error.kind() {
        ErrorKind::AlreadyExists => {
            TrainError::usage(format!("cannot {operation} {}: {error}", path.display()))
        }
        _ => TrainError::io(operation, path)(error),
    }
}

/// Returns whether `path` leads to the standard output of this process, as `/dev/stdout` does.
pub fn is_standard_output(path: &Path) -> bool {
    let output = rustix::fs::fstat(stdout());
    let named = fs::metadata(path);
    output.is_ok_and(|output| {
        named.is_ok_and(|named| (named.dev(), named.ino()) == (output.st_dev, output.st_ino))
    })
}
