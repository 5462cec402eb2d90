//! Files that are on the disk as a whole or not at all: written beside their place, synced, renamed.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Writes a new file and waits until it is on the disk. An interruption may leave half of it: for files of a
/// folder that has not come to its place yet.
pub fn write(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(content)?;
    file.sync_all()
}

/// Waits until the names in a folder are on the disk: a rename is durable once its folder is synced.
pub fn sync_folder(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// The folder that `path` is in.
pub fn parent_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Between the name of a file and the process that is writing it.
const BESIDE: &str = ".kiln-";

/// Replaces a file as a whole: a reader sees the old content or the new, never a part. No other file
/// is touched: the new content is first written to a file that was not there before.
pub fn write_beside(path: &Path, content: &[u8]) -> io::Result<()> {
    let (beside, mut file) = create_beside(path)?;
    let written =
        file.write_all(content).and_then(|()| file.sync_all()).and_then(|()| fs::rename(&beside, path));
    if written.is_err() {
        let _ = fs::remove_file(&beside);
    }
    written
}

/// As [`write_beside`], of a file that is not there yet: what is there by the time the content is written stays,
/// and the error is [`AlreadyExists`](io::ErrorKind::AlreadyExists).
pub fn write_new_beside(path: &Path, content: &[u8]) -> io::Result<()> {
    let (beside, mut file) = create_beside(path)?;
    let written =
        file.write_all(content).and_then(|()| file.sync_all()).and_then(|()| fs::hard_link(&beside, path));
    let _ = fs::remove_file(&beside);
    written
}

/// Whether `name` is that of what [`write_beside`] is about to make the file `of`.
pub fn is_beside(name: &OsStr, of: &str) -> bool {
    let name = name.to_str().and_then(|name| name.strip_prefix('.')?.strip_prefix(of));
    name.is_some_and(|rest| rest.starts_with(BESIDE))
}

/// Creates a hidden file beside `path` under a name that nobody has.
fn create_beside(path: &Path) -> io::Result<(PathBuf, File)> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let mut index = 0;
    loop {
        let beside = path.with_file_name(format!(".{name}{BESIDE}{}-{index}", std::process::id()));
        match OpenOptions::new().write(true).create_new(true).open(&beside) {
            Ok(file) => return Ok((beside, file)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => index += 1,
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writing_beside_touches_no_other_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.toml");
        let mine = format!(".config.toml.kiln-{}-0", std::process::id());
        let others = ["config.partial", "config.tmp", &mine];
        for name in others {
            fs::write(folder.path().join(name), name).unwrap();
        }
        write_beside(&path, b"one").unwrap();
        write_beside(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        for name in others {
            assert_eq!(fs::read_to_string(folder.path().join(name)).unwrap(), name);
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 4);
        // Nothing stays of what did not succeed.
        fs::create_dir(folder.path().join("taken")).unwrap();
        assert!(write_beside(&folder.path().join("taken"), b"x").is_err());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 5);
    }

    #[test]
    fn what_is_new_replaces_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.toml");
        write_new_beside(&path, b"one").unwrap();
        let taken = write_new_beside(&path, b"two").unwrap_err();
        assert_eq!(taken.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read(&path).unwrap(), b"one");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
