//! What checkpoints ask of the file system besides reading and writing.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::Path;

use kiln_storage::durable;
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};

use super::{CheckpointError, MANIFEST_FILE, Result};

/// Writes a whole small file and waits until it is on the disk.
pub(super) fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = File::create(path).map_err(CheckpointError::io("create", path))?;
    file.write_all(bytes).map_err(CheckpointError::io("write", path))?;
    file.sync_all().map_err(CheckpointError::io("sync", path))
}

/// Waits until the names in a folder are on the disk: a rename is durable once its folder is.
pub(super) fn sync_folder(path: &Path) -> Result<()> {
    durable::sync_folder(path).map_err(CheckpointError::io("sync", path))
}

/// Puts the checkpoint's folder `beside` at `place`, at once: whoever looks finds the old or the new one,
/// whole. What was there before is gone afterwards.
pub(super) fn replace_folder(beside: &Path, place: &Path) -> Result<()> {
    if !place.is_dir() {
        return rename(beside, place);
    }
    match renameat2(AT_FDCWD, beside, AT_FDCWD, place, RenameFlags::RENAME_EXCHANGE) {
        Ok(()) => remove(beside),
        // Some file systems cannot exchange.
        Err(Errno::EINVAL | Errno::ENOSYS) => replace_by_turns(beside, place),
        Err(error) => Err(CheckpointError::io("rename to", place)(error.into())),
    }
}

/// [`replace_folder`] in several steps: the old one is moved aside first, so that a whole one exists at
/// every moment, if not at its place. If the new one cannot take its place, the old one comes back.
fn replace_by_turns(beside: &Path, place: &Path) -> Result<()> {
    let old = beside.with_extension("old");
    // An earlier replacement may have been interrupted when the only whole one was aside.
    if is_whole(place) || !is_whole(&old) {
        remove(&old)?;
        rename(place, &old)?;
    } else {
        remove(place)?;
    }
    if let Err(error) = rename(beside, place) {
        // The error on its way says what matters; a start finds what stays aside.
        let _ = fs::rename(&old, place);
        return Err(error);
    }
    remove(&old)
}

/// Gives a file or folder another name, in the place of a file of that name.
pub(super) fn rename(from: &Path, to: &Path) -> Result<()> {
    fs::rename(from, to).map_err(CheckpointError::io("rename to", to))
}

/// Whether there is a whole checkpoint at `path` itself, as far as can be seen.
pub(super) fn is_whole(path: &Path) -> bool {
    look(path).unwrap_or(false)
}

/// As [`is_whole`]; an error if it cannot be seen.
pub(super) fn look(path: &Path) -> io::Result<bool> {
    match fs::metadata(path.join(MANIFEST_FILE)) {
        Ok(_) => Ok(true),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Removes a checkpoint's folder so that no half of it can be taken for a checkpoint, whenever this is
/// interrupted: it is moved to `aside` first, where [`remove`] can end the work later.
pub(super) fn remove_by_way_of(path: &Path, aside: &Path) -> Result<()> {
    remove(aside)?;
    rename(path, aside)?;
    remove(aside)
}

/// Removes a folder with all that is in it, if it is there.
pub(super) fn remove(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(CheckpointError::io("remove", path)(error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A checkpoint's folder, whose manifest says `content`.
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
        // The new one is not there to take its place.
        assert!(replace_by_turns(&beside, &place).is_err());
        assert_eq!(content(&place), "old");
        whole(&beside, "new");
        replace_by_turns(&beside, &place).unwrap();
        assert_eq!(content(&place), "new");
        assert!(!beside.exists() && !old.exists());
        // Half of one at the place, while the only whole one is still aside.
        fs::rename(&place, &old).unwrap();
        fs::create_dir(&place).unwrap();
        assert!(replace_by_turns(&beside, &place).is_err());
        assert_eq!(content(&place), "new");
        // What is aside is nobody's if there is a whole one at the place.
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
