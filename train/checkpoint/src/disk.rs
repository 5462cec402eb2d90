//! File system operations of checkpoints other than reading and writing.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::Path;

use kiln_sys::durable;
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};

use super::{CheckpointError, MANIFEST_FILE, Result};

/// Writes a small file and waits until it is on the disk.
pub(super) fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = File::create(path).map_err(CheckpointError::io("create", path))?;
    file.write_all(bytes).map_err(CheckpointError::io("write", path))?;
    file.sync_all().map_err(CheckpointError::io("sync", path))
}

/// Waits until the names in a folder are on the disk: a rename is durable once its folder is synced.
pub(super) fn sync_folder(path: &Path) -> Result<()> {
    durable::sync_folder(path).map_err(CheckpointError::io("sync", path))
}

/// Moves the checkpoint's folder `beside` to `place` atomically: readers see the old folder or the new one,
/// never a part. Deletes the folder that was there before.
pub(super) fn replace_folder(beside: &Path, place: &Path) -> Result<()> {
    if !place.is_dir() {
        return rename(beside, place);
    }
    match renameat2(AT_FDCWD, beside, AT_FDCWD, place, RenameFlags::RENAME_EXCHANGE) {
        Ok(()) => remove(beside),
        // Some file systems do not support exchanging.
        Err(Errno::EINVAL | Errno::ENOSYS) => replace_by_turns(beside, place),
        Err(error) => Err(CheckpointError::io("rename to", place)(error.into())),
    }
}

/// Does the work of [`replace_folder`] in several steps: the old folder is moved aside first, so that a
/// complete one exists at every moment, if not at its place. If the new one cannot be moved to its place, the
/// old one is moved back.
fn replace_by_turns(beside: &Path, place: &Path) -> Result<()> {
    let old = beside.with_extension("old");
    // An earlier replacement may have been interrupted while the only complete folder was aside.
    if is_whole(place) || !is_whole(&old) {
        remove(&old)?;
        rename(place, &old)?;
    } else {
        remove(place)?;
    }
    if let Err(error) = rename(beside, place) {
        // The original error matters more; the next start finds a folder that stays aside.
        let _ = fs::rename(&old, place);
        return Err(error);
    }
    remove(&old)
}

/// Renames a file or folder, and replaces an existing file.
pub(super) fn rename(from: &Path, to: &Path) -> Result<()> {
    fs::rename(from, to).map_err(CheckpointError::io("rename to", to))
}

/// Returns whether there is a complete checkpoint at `path` itself, as far as can be determined.
pub(super) fn is_whole(path: &Path) -> bool {
    look(path).unwrap_or(false)
}

/// Like [`is_whole`], but returns an error if that cannot be determined.
pub(super) fn look(path: &Path) -> io::Result<bool> {
    match fs::metadata(path.join(MANIFEST_FILE)) {
        Ok(_) => Ok(true),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Removes a checkpoint's folder such that an interrupted removal never leaves a part that looks like a
/// checkpoint: it is moved to `aside` first, where [`remove`] can finish the work later.
pub(super) fn remove_by_way_of(path: &Path, aside: &Path) -> Result<()> {
    remove(aside)?;
    rename(path, aside)?;
    remove(aside)
}

/// Removes a folder with all of its contents, if it exists.
pub(super) fn remove(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(CheckpointError::io("remove", path)(error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a checkpoint's folder with the manifest `content`.
    fn whole(path: &Path, content: &str) {
        fs::create_dir(path).unwrap();
        fs::write(path.join(MANIFEST_FILE), content).unwrap();
    }

    fn content(path: &Path) -> String {
        fs::read_to_string(path.join(MANIFEST_FILE)).unwrap()
    }

    #[test]
    fn one_of_two_folders_stays_whatever_fails() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let (beside, place, old) = (path(".fsdp_cpt4.partial"), path("fsdp_cpt4"), path(".fsdp_cpt4.old"));
        whole(&place, "old");
        // The new one does not exist.
        assert!(replace_by_turns(&beside, &place).is_err());
        assert_eq!(content(&place), "old");
        whole(&beside, "new");
        replace_by_turns(&beside, &place).unwrap();
        assert_eq!(content(&place), "new");
        assert!(!beside.exists() && !old.exists());
        // A part at the place, while the only complete folder is still aside.
        fs::rename(&place, &old).unwrap();
        fs::create_dir(&place).unwrap();
        assert!(replace_by_turns(&beside, &place).is_err());
        assert_eq!(content(&place), "new");
        // The folder aside is obsolete if there is a complete one at the place.
        whole(&old, "older");
        whole(&beside, "newest");
        replace_by_turns(&beside, &place).unwrap();
        assert_eq!(content(&place), "newest");
        assert!(!old.exists());
    }

    #[test]
    fn a_file_does_not_replace_a_folder() {
        let folder = tempfile::tempdir().unwrap();
        let (beside, place) = (folder.path().join("beside"), folder.path().join("latest"));
        fs::create_dir(&place).unwrap();
        fs::write(place.join("mine"), "").unwrap();
        fs::write(&beside, "").unwrap();
        assert!(rename(&beside, &place).is_err());
        assert!(place.join("mine").exists());
    }
}
