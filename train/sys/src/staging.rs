//! Folders that appear at their place as a whole, or not at all.

use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use crate::ProcessId;

use crate::durable::parent_of;

/// A new hidden folder for content that should appear as a whole at a place next to it. Dropping it removes
/// the folder, unless the folder is at its place. Creating one removes folders that killed processes have
/// left for the same place.
#[derive(Debug)]
pub struct StagingFolder {
    path: PathBuf,
    /// Locked while someone works in the folder, where folders can be locked.
    _lock: File,
    /// True if the folder is no longer there, so that its name may belong to someone else.
    is_gone: bool,
}

impl StagingFolder {
    /// Creates a folder for `place`, whose parent must exist. Its name is unique across machines.
    pub fn create(place: &Path) -> io::Result<Self> {
        let name = place.file_name().unwrap_or_default().to_string_lossy();
        let prefix = format!(".{name}{KILN}{}-", ProcessId::this().kernel());
        let parent = parent_of(place);
        sweep(parent, &prefix);
        let mut index = 0;
        loop {
            let path = parent.join(format!("{prefix}{}-{index}", std::process::id()));
            index += 1;
            match fs::create_dir(&path) {
                Err(error) if error.kind() == ErrorKind::AlreadyExists => continue,
                created => created?,
            }
            // Another process may remove the folder before it is locked.
            let lock = match File::open(&path) {
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                opened => opened?,
            };
            if matches!(lock.try_lock(), Err(TryLockError::WouldBlock)) || !path.exists() {
                continue;
            }
            return Ok(StagingFolder { path, _lock: lock, is_gone: false });
        }
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Records that the folder has moved to its place, or was removed.
    pub fn gone(mut self) {
        self.is_gone = true;
    }
}

impl Drop for StagingFolder {
    fn drop(&mut self) {
        if !self.is_gone {
            // An error is already being returned; a second one about cleaning up would hide it.
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

/// Separates the name of a place from the process that creates its content.
const KILN: &str = ".kiln-";

/// Removes the folders in `parent` whose names are `prefix`, which names this kernel, and two numbers, and
/// that no one has locked. A lock held by another machine may be invisible here, so its folders stay, and so
/// do those that cannot be locked.
fn sweep(parent: &Path, prefix: &str) {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let rest = name.to_str().and_then(|name| name.strip_prefix(prefix)?.split_once('-'));
        let is_ours = rest.is_some_and(|(process, index)| is_number(process) && is_number(index));
        if !is_ours || !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        if let Ok(folder) = File::open(entry.path())
            && folder.try_lock().is_ok()
        {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_killed_process_has_left_is_swept_and_nothing_else() {
        let root = tempfile::tempdir().unwrap();
        let place = root.path().join("model");
        let living = StagingFolder::create(&place).unwrap();
        let kernel = ProcessId::this().kernel();
        let ours = |rest: &str| format!(".model.kiln-{kernel}-{rest}");
        let dead = ours("7-0");
        let far = ".model.kiln-00000000-7-0".to_owned();
        let other = format!(".other.kiln-{kernel}-7-0");
        let visible = format!("model.kiln-{kernel}-7-0");
        let others = [ours("7-x"), ours("7"), far, other, visible];
        for name in others.iter().chain([&dead]) {
            fs::create_dir(root.path().join(name)).unwrap();
            fs::write(root.path().join(name).join("weights"), "").unwrap();
        }
        let second = StagingFolder::create(&place).unwrap();
        assert_ne!(living.path(), second.path());
        assert!(living.path().is_dir() && second.path().is_dir());
        assert!(!root.path().join(dead).exists());
        assert!(others.iter().all(|name| root.path().join(name).join("weights").exists()));
        drop((living, second));
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), others.len());
    }
}
