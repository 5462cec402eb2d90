//! Checks that a run's folder is still the one that the run has locked: someone may move, replace or remove the folder,
//! or redirect a symbolic link in its path.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_sys::files;

use super::{CheckpointError, Result};

/// A folder, and an open, locked file in it that proves that the folder belongs to this run.
#[derive(Clone, Debug)]
pub struct HeldFolder {
    folder: PathBuf,
    path: PathBuf,
    file: Arc<File>,
}

impl HeldFolder {
    /// Wraps `folder`, which is held as long as `path` leads to the open file `file`.
    pub fn new(folder: &Path, path: PathBuf, file: Arc<File>) -> Self {
        HeldFolder { folder: folder.to_owned(), path, file }
    }

    /// Fails with [`CheckpointError::NotHeld`] if the locked folder was moved, removed or replaced.
    pub fn check(&self) -> Result<()> {
        let lost = || CheckpointError::NotHeld { folder: self.folder.clone() };
        let unreadable = |error: std::io::Error| match error.kind() {
            ErrorKind::NotFound | ErrorKind::NotADirectory | ErrorKind::StaleNetworkFileHandle => lost(),
            ErrorKind::InvalidInput => lost(),
            _ => CheckpointError::io("read", &self.path)(error),
        };
        // Opening a file asks the server of a network file system; `stat` may be answered from a cache.
        let there = files::open(&self.path).and_then(|file| file.metadata()).map_err(unreadable)?;
        let held = self.file.metadata().map_err(unreadable)?;
        let is_same = (there.dev(), there.ino()) == (held.dev(), held.ino());
        if is_same { Ok(()) } else { Err(lost()) }
    }

    /// Reports whether the folder is known to be gone or to belong to another run.
    pub fn is_lost(&self) -> bool {
        matches!(self.check(), Err(CheckpointError::NotHeld { .. }))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn folder_is_held_while_its_path_leads_to_the_file() {
        let root = tempfile::tempdir().unwrap();
        let (out, aside) = (root.path().join("run"), root.path().join("aside"));
        let create = || {
            fs::create_dir(&out).unwrap();
            Arc::new(File::create(out.join("lock")).unwrap())
        };
        let held = HeldFolder::new(&out, out.join("lock"), create());
        held.check().unwrap();
        fs::rename(&out, &aside).unwrap();
        assert!(held.is_lost(), "moved");
        create();
        assert!(held.is_lost(), "replaced");
        fs::remove_dir_all(&out).unwrap();
        assert!(held.is_lost(), "removed");
        fs::rename(&aside, &out).unwrap();
        held.check().unwrap();
    }
}
