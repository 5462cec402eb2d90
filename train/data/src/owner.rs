//! Whose a folder under construction is, so that what a killed prepare has left can be told from what
//! another one still writes.
//!
//! Whoever makes such a folder marks it: a file in it names the process, which holds the file's lock. The
//! kernel lets go of the lock when the process ends, however it ends. So a folder is surely nobody's if it
//! was marked under this kernel and its lock is free. Of a process on another machine, nobody here can tell.

use super::remark::LeftBehind;
use super::{DataError, Result};
use kiln_process::ProcessId;
use std::fs::{self, DirEntry, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

/// Name of the mark, inside the folder.
const MARK_FILE: &str = ".writer.json";

/// What the name of a folder under construction has between that of the final folder and a number.
pub(super) const PARTIAL: &str = ".partial-";

/// This process, as the one that writes a folder, until this is dropped.
#[derive(Debug)]
pub(super) struct Mark {
    // Locked.
    _file: File,
}

impl Mark {
    /// Marks a folder that this process has just made.
    pub(super) fn set(folder: &Path) -> Result<Self> {
        let path = folder.join(MARK_FILE);
        let write = || {
            let mut file = OpenOptions::new().write(true).create_new(true).open(&path)?;
            // Where there are no locks, nobody can tell that this process has ended: the folder stays.
            let _ = file.lock();
            // Not before it is locked: whoever finds it whole and free knows that the process has ended.
            file.write_all(&serde_json::to_vec(&ProcessId::this())?)?;
            Ok(file)
        };
        let file = write().map_err(DataError::io("write", &path))?;
        Ok(Self { _file: file })
    }

    /// Takes the mark off the folder, which has got its final name. It says nothing there.
    pub(super) fn remove_from(&self, folder: &Path) {
        let _ = fs::remove_file(folder.join(MARK_FILE));
    }
}

/// Removes the folders under construction in `parent` whose writers have ended, as far as that is sure.
/// Returns those of other machines. What cannot be read or removed is no reason to stop.
pub(super) fn sweep(parent: &Path) -> Vec<LeftBehind> {
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    let mut folders: Vec<_> = entries.filter(is_unfinished).map(|entry| entry.path()).collect();
    folders.sort();
    folders.into_iter().filter_map(sweep_one).collect()
}

/// Whether it is a folder of the name that one under construction has.
fn is_unfinished(entry: &DirEntry) -> bool {
    let name = entry.file_name();
    let name = name.to_string_lossy();
    let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
    is_folder && name.starts_with('.') && name.contains(PARTIAL)
}

fn sweep_one(path: PathBuf) -> Option<LeftBehind> {
    // For writing, too: without it, NFS gives no lock that keeps others out.
    let mark = OpenOptions::new().read(true).write(true).open(path.join(MARK_FILE)).ok()?;
    // Not whole yet, or not ours.
    let writer: ProcessId = serde_json::from_reader(&mark).ok()?;
    if !writer.shares_kernel_with(&ProcessId::this()) {
        return Some(LeftBehind { path, host: writer.host, pid: writer.pid });
    }
    if mark.try_lock().is_ok()
        && let Err(error) = remove(&path)
    {
        tracing::warn!(path = %path.display(), %error, "cannot remove what a killed prepare has left");
    }
    None
}

/// Removes a folder under construction, its mark last: whoever is killed meanwhile leaves a marked folder.
pub(super) fn remove(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_name() == MARK_FILE {
            continue;
        }
        match entry.file_type()?.is_dir() {
            true => fs::remove_dir_all(entry.path())?,
            false => fs::remove_file(entry.path())?,
        }
    }
    fs::remove_dir_all(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(parent: &Path, name: &str) -> PathBuf {
        let path = parent.join(name);
        fs::create_dir(&path).unwrap();
        fs::write(path.join("train.bin"), "x").unwrap();
        path
    }

    #[test]
    fn only_what_is_surely_nobodys_is_removed() {
        let parent = tempfile::tempdir().unwrap();
        let parent = parent.path();
        let make = |name| folder(parent, name);
        let dead = make(".a.partial-1-0");
        drop(Mark::set(&dead).unwrap());
        let living = make(".b.partial-1-0");
        let _mark = Mark::set(&living).unwrap();
        // Marked by nobody, by somebody who is about to, by a link, and under a name that a user gave.
        let unmarked = make(".c.partial-1-0");
        let torn = make(".d.partial-1-0");
        fs::write(torn.join(MARK_FILE), "{\"host\":").unwrap();
        let named = make("e.partial-1-0");
        drop(Mark::set(&named).unwrap());
        let target = make("target");
        drop(Mark::set(&target).unwrap());
        std::os::unix::fs::symlink(&target, parent.join(".f.partial-1-0")).unwrap();
        let far = make(".g.partial-1-0");
        let mut process = serde_json::to_value(ProcessId::this()).unwrap();
        (process["host"], process["boot"], process["pid"]) = ("far".into(), "other".into(), 7.into());
        fs::write(far.join(MARK_FILE), process.to_string()).unwrap();

        let left = sweep(parent);
        assert_eq!(left, [LeftBehind { path: far.clone(), host: "far".to_owned(), pid: 7 }]);
        assert!(!dead.exists());
        for path in [living, unmarked, torn, named, target, far] {
            assert!(path.join("train.bin").exists(), "{}", path.display());
        }
    }

    #[test]
    fn a_folder_goes_with_all_that_is_in_it() {
        let parent = tempfile::tempdir().unwrap();
        let path = folder(parent.path(), ".a.partial-1-0");
        fs::create_dir_all(path.join("deep/er")).unwrap();
        drop(Mark::set(&path).unwrap());
        remove(&path).unwrap();
        assert!(!path.exists());
        assert!(remove(&path).is_err());
    }
}
