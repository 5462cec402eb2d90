//! What checkpoints ask of the file system besides reading and writing.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};

use super::CheckpointError;

/// Writes a whole small file and waits until it is on the disk.
pub(super) fn write(path: &Path, bytes: &[u8]) -> Result<(), CheckpointError> {
    let mut file = File::create(path).map_err(CheckpointError::io("create", path))?;
    file.write_all(bytes).map_err(CheckpointError::io("write", path))?;
    file.sync_all().map_err(CheckpointError::io("sync", path))
}

/// Waits until the names in a folder are on the disk: a rename is durable once its folder is.
pub(super) fn sync_folder(path: &Path) -> Result<(), CheckpointError> {
    File::open(path).and_then(|file| file.sync_all()).map_err(CheckpointError::io("sync", path))
}

/// The folder that `path` is in.
pub(crate) fn parent_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Puts the folder or file `beside` at `place`, at once: whoever looks finds the old or the new one,
/// whole. What was there before is gone afterwards.
pub(super) fn replace(beside: &Path, place: &Path) -> Result<(), CheckpointError> {
    if !place.is_dir() {
        return fs::rename(beside, place).map_err(CheckpointError::io("rename to", place));
    }
    match renameat2(AT_FDCWD, beside, AT_FDCWD, place, RenameFlags::RENAME_EXCHANGE) {
        Ok(()) => remove(beside),
        // Some file systems cannot exchange. The old one is moved aside first, so that a complete
        // one exists at every moment, if not at its place.
        Err(Errno::EINVAL | Errno::ENOSYS) => {
            let old = beside.with_extension("old");
            remove(&old)?;
            let rename = |from: &Path, to: &Path| {
                fs::rename(from, to).map_err(CheckpointError::io("rename to", to))
            };
            rename(place, &old)?;
            rename(beside, place)?;
            remove(&old)
        }
        Err(error) => Err(CheckpointError::io("rename to", place)(error.into())),
    }
}

/// Removes a folder with all that is in it, if it is there.
pub(super) fn remove(path: &Path) -> Result<(), CheckpointError> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(CheckpointError::io("remove", path)(error))
        }
        _ => Ok(()),
    }
}
