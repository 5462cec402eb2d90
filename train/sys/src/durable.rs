//! Writes files and folders atomically: next to their final place, then synced and renamed.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

use crate::{ProcessId, files};

/// Writes and syncs a new file. An interruption may leave a partial file, so use it only within a staging folder.
pub fn write(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(content)?;
    file.sync_all()
}

/// Syncs a folder, which makes a rename in it durable.
pub fn sync_folder(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// Returns the folder that contains `path`.
pub fn parent_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Separates the final name from the writer's process id in the names of temporary files and folders.
const BESIDE: &str = ".kiln-";

/// Replaces a file atomically: readers see the old or the new content. Changes no other file.
pub fn write_atomic(path: &Path, content: &[u8]) -> io::Result<()> {
    let (beside, mut file) = create_beside(path)?;
    let written =
        file.write_all(content).and_then(|()| file.sync_all()).and_then(|()| fs::rename(&beside, path));
    if written.is_err() {
        let _ = fs::remove_file(&beside);
    }
    written
}

const START: u64 = 512;

/// Writes a file that a user has named. Replaces an earlier file of the same kind atomically, even through a link, and
/// writes into a pipe or device. `is_of_kind` recognises a file by its first 512 bytes, and `kind` names the kind in
/// messages. An empty file has every kind.
///
/// # Errors
///
/// [`AlreadyExists`](io::ErrorKind::AlreadyExists) if `path` has a different kind, or errors of the file system.
pub fn write_named(
    path: &Path,
    content: &[u8],
    kind: &str,
    is_of_kind: impl FnOnce(&[u8]) -> bool,
) -> io::Result<()> {
    let found = match fs::metadata(path) {
        Ok(found) => found,
        // Through a broken link, the file is created at the link's target.
        Err(error) if error.kind() == ErrorKind::NotFound && path.is_symlink() => {
            return fs::write(path, content);
        }
        Err(error) if error.kind() == ErrorKind::NotFound => return write_atomic(path, content),
        Err(error) => return Err(error),
    };
    if !found.is_file() {
        return OpenOptions::new().write(true).open(path)?.write_all(content);
    }
    let path = path.canonicalize()?;
    let mut start = Vec::new();
    files::open(&path)?.take(START).read_to_end(&mut start)?;
    if !start.is_empty() && !is_of_kind(&start) {
        let problem = format!("it exists and is not a {kind}: name another file");
        return Err(io::Error::new(ErrorKind::AlreadyExists, problem));
    }
    write_atomic(&path, content)
}

/// Like [`write_atomic`], but if `path` exists, keeps that file and returns
/// [`AlreadyExists`](io::ErrorKind::AlreadyExists).
pub fn write_new_beside(path: &Path, content: &[u8]) -> io::Result<()> {
    let (beside, mut file) = create_beside(path)?;
    let written =
        file.write_all(content).and_then(|()| file.sync_all()).and_then(|()| fs::hard_link(&beside, path));
    let _ = fs::remove_file(&beside);
    written
}

/// Returns whether `name` is a temporary file of [`write_atomic`] for the file `of`.
pub fn is_beside(name: &OsStr, of: &str) -> bool {
    let name = name.to_str().and_then(|name| name.strip_prefix('.')?.strip_prefix(of));
    name.is_some_and(|rest| rest.starts_with(BESIDE))
}

fn create_beside(path: &Path) -> io::Result<(PathBuf, File)> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let mut index = 0;
    loop {
        let beside = path.with_file_name(format!(".{name}{BESIDE}{}-{index}", std::process::id()));
        match OpenOptions::new().write(true).create_new(true).open(&beside) {
            Ok(file) => return Ok((beside, file)),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => index += 1,
            Err(error) => return Err(error),
        }
    }
}

/// A new hidden folder, to be renamed to a final place next to it. Dropping it removes the folder, unless
/// [`StagingFolder::gone`] was called.
#[derive(Debug)]
pub struct StagingFolder {
    path: PathBuf,
    /// Held while a process works in the folder, if the file system can lock folders.
    _lock: File,
    /// True if the folder was moved or removed, so that another process may use its name.
    is_gone: bool,
}

impl StagingFolder {
    /// Creates a folder for `place`, whose parent must exist, under a name unique across machines. Removes folders that
    /// killed processes on this machine left behind for `place`.
    pub fn create(place: &Path) -> io::Result<Self> {
        let name = place.file_name().unwrap_or_default().to_string_lossy();
        let prefix = format!(".{name}{BESIDE}{}-", ProcessId::this().kernel());
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

    /// The path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Records that the folder was moved to its final place, or removed.
    pub fn gone(mut self) {
        self.is_gone = true;
    }
}

impl Drop for StagingFolder {
    fn drop(&mut self) {
        if !self.is_gone {
            // An error here would hide the original error.
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

/// Removes unlocked folders named `prefix` and two numbers. `prefix` identifies this kernel: locks of other machines
/// may be invisible here.
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
    fn other_files_stay_untouched() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.toml");
        let mine = format!(".config.toml.kiln-{}-0", std::process::id());
        let others = ["config.partial", "config.tmp", &mine];
        for name in others {
            fs::write(folder.path().join(name), name).unwrap();
        }
        write_atomic(&path, b"one").unwrap();
        write_atomic(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        for name in others {
            assert_eq!(fs::read_to_string(folder.path().join(name)).unwrap(), name);
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 4);
        fs::create_dir(folder.path().join("taken")).unwrap();
        assert!(write_atomic(&folder.path().join("taken"), b"x").is_err());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 5);
    }

    #[test]
    fn only_files_of_the_same_kind_are_replaced() {
        use std::os::unix::fs::symlink;
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let write =
            |name: &str| write_named(&path(name), b"table 2", "table", |start| start.starts_with(b"table"));
        for (name, content) in [("old", "table 1"), ("empty", ""), ("other", "{\"step\":1}")] {
            fs::write(path(name), content).unwrap();
        }
        symlink("old", path("link")).unwrap();
        symlink("made", path("dangling")).unwrap();
        symlink("other", path("to-other")).unwrap();
        for name in ["new", "empty", "link", "dangling"] {
            write(name).unwrap();
            assert_eq!(fs::read(path(name)).unwrap(), b"table 2", "{name}");
        }
        assert!(path("link").is_symlink() && path("dangling").is_symlink());
        assert_eq!(fs::read(path("old")).unwrap(), b"table 2");
        for name in ["other", "to-other"] {
            let error = write(name).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::AlreadyExists);
            assert!(error.to_string().contains("is not a table"), "{error}");
        }
        assert_eq!(fs::read(path("other")).unwrap(), b"{\"step\":1}");
        symlink("/dev/full", path("device")).unwrap();
        assert_eq!(write("device").unwrap_err().kind(), ErrorKind::StorageFull);
        assert!(!fs::metadata("/dev/full").unwrap().is_file() && path("device").is_symlink());
    }

    #[test]
    fn new_files_replace_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.toml");
        write_new_beside(&path, b"one").unwrap();
        let taken = write_new_beside(&path, b"two").unwrap_err();
        assert_eq!(taken.kind(), ErrorKind::AlreadyExists);
        assert_eq!(fs::read(&path).unwrap(), b"one");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn only_folders_of_killed_processes_are_swept() {
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
