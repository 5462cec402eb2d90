//! Tracking which process writes a folder under construction, to distinguish the remains of a killed
//! preparation from a folder that is still being written.
//!
//! The process that creates such a folder marks it: a file in the folder names the process, which holds a
//! lock on the file. The kernel releases the lock when the process ends, however it ends. So the writer of a
//! folder has certainly ended if the folder was marked under this kernel and its lock is free. The state of a
//! process on another machine is unknown here.
//!
//! A folder whose writer has ended is removed, unless it has a record of work to resume.

use super::inputs::Inputs;
use super::remark::LeftBehind;
use super::resume::Record;
use super::{DataError, Result};
use kiln_sys::ProcessId;
use std::fs::{self, DirEntry, File, OpenOptions};
use std::io::{self, Seek as _, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// Name of the mark file, inside the folder.
const MARK_FILE: &str = ".writer.json";

/// The part of a temporary folder's name between the name of the final folder and a number.
pub(super) const PARTIAL: &str = ".partial-";

/// Marks this process as the writer of a folder, until dropped.
#[derive(Debug)]
pub(super) struct Mark {
    // Locked.
    _file: File,
}

impl Mark {
    /// Marks a folder that this process has just created.
    pub(super) fn set(folder: &Path) -> Result<Self> {
        let path = folder.join(MARK_FILE);
        let write = || {
            let mut file = OpenOptions::new().write(true).create_new(true).open(&path)?;
            // Without locks, no one can know that this process has ended: the folder stays.
            let _ = file.lock();
            // Written only once locked: a complete mark with a free lock means that the process has ended.
            file.write_all(&serde_json::to_vec(&ProcessId::this())?)?;
            Ok(file)
        };
        let file = write().map_err(DataError::io("write", &path))?;
        Ok(Self { _file: file })
    }

    /// Replaces the process named in a mark, which has ended, with this one, which holds the lock.
    fn take(mut file: File) -> io::Result<Self> {
        file.set_len(0)?;
        file.rewind()?;
        file.write_all(&serde_json::to_vec(&ProcessId::this())?)?;
        Ok(Self { _file: file })
    }

    /// Removes the mark from a folder that has received its final name, where it has no meaning.
    pub(super) fn remove_from(&self, folder: &Path) {
        let _ = fs::remove_file(folder.join(MARK_FILE));
    }
}

/// The result of [`sweep`].
#[derive(Debug, Default)]
pub(super) struct Swept {
    /// Folders with a record of work under the requested name.
    pub(super) left: Vec<Left>,
    /// Folders of other machines.
    pub(super) left_behind: Vec<LeftBehind>,
    /// Folders with a record of work under other names.
    pub(super) kept: Vec<PathBuf>,
}

/// A folder with a record of work, whose writer has ended. No other process takes it over until this is
/// dropped.
#[derive(Debug)]
pub(super) struct Left {
    pub(super) path: PathBuf,
    // Locked.
    file: File,
}

impl Left {
    /// Reports whether it is work on `inputs`.
    pub(super) fn is_of(&self, inputs: &Inputs) -> bool {
        Record::load(&self.path, inputs).is_some()
    }

    /// Takes the folder over for this process.
    pub(super) fn take(self) -> Result<(PathBuf, Mark)> {
        let mark = Mark::take(self.file).map_err(DataError::io("write", &self.path.join(MARK_FILE)))?;
        Ok((self.path, mark))
    }
}

/// Examines the folders under construction in `parent` whose writers have certainly ended. Keeps those with a
/// record and removes the others. The name of a folder to resume begins with `prefix`. Entries that cannot be
/// read or removed are skipped.
pub(super) fn sweep(parent: &Path, prefix: &str) -> Swept {
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    let mut folders: Vec<_> = entries.filter(is_unfinished).map(|entry| entry.path()).collect();
    folders.sort();
    let mut swept = Swept::default();
    for path in folders {
        sweep_one(path, prefix, &mut swept);
    }
    swept
}

/// Reports whether the entry has the name of a folder under construction.
fn is_unfinished(entry: &DirEntry) -> bool {
    let name = entry.file_name();
    let name = name.to_string_lossy();
    let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
    is_folder && name.starts_with('.') && name.contains(PARTIAL)
}

fn sweep_one(path: PathBuf, prefix: &str, swept: &mut Swept) {
    // Opened for writing, too: otherwise NFS gives no exclusive lock.
    let Ok(file) = OpenOptions::new().read(true).write(true).open(path.join(MARK_FILE)) else { return };
    // The mark is incomplete, or is not a mark of Kiln.
    let Ok(writer) = serde_json::from_reader::<_, ProcessId>(&file) else { return };
    if !writer.shares_kernel_with(&ProcessId::this()) {
        return swept.left_behind.push(LeftBehind { path, host: writer.host, pid: writer.pid });
    }
    // Its writer may have given the folder its final name since.
    if file.try_lock().is_err() || !is_at(&file, &path.join(MARK_FILE)) {
        return;
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    match Record::is_in(&path) {
        true if name.starts_with(prefix) => return swept.left.push(Left { path, file }),
        true => return swept.kept.push(path),
        false => {}
    }
    if let Err(error) = remove(&path) {
        tracing::warn!(path = %path.display(), %error, "cannot remove what a killed prepare has left");
    }
}

/// Reports whether `file` is still the file at `path`.
fn is_at(file: &File, path: &Path) -> bool {
    let place = |of: fs::Metadata| (of.dev(), of.ino());
    fs::metadata(path).is_ok_and(|there| file.metadata().is_ok_and(|of| place(of) == place(there)))
}

/// Removes a folder under construction, its mark last: a process killed meanwhile leaves a marked folder.
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
    fn only_folders_whose_writer_has_surely_ended_are_removed() {
        let parent = tempfile::tempdir().unwrap();
        let parent = parent.path();
        let make = |name| folder(parent, name);
        let dead = make(".a.partial-1-0");
        drop(Mark::set(&dead).unwrap());
        let living = make(".b.partial-1-0");
        let _mark = Mark::set(&living).unwrap();
        // A folder without a mark, one about to be marked, a link, and a name that a user chose.
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

        let Swept { left, left_behind, kept } = sweep(parent, ".a.partial-");
        assert_eq!(left_behind, [LeftBehind { path: far.clone(), host: "far".to_owned(), pid: 7 }]);
        assert!(left.is_empty() && kept.is_empty() && !dead.exists());
        for path in [living, unmarked, torn, named, target, far] {
            assert!(path.join("train.bin").exists(), "{}", path.display());
        }
    }

    #[test]
    fn work_to_go_on_from_stays_and_is_taken_once() {
        let parent = tempfile::tempdir().unwrap();
        let parent = parent.path();
        let [first, second, other] = [".a.partial-1-0", ".a.partial-2-0", ".b.partial-1-0"].map(|name| {
            let path = folder(parent, name);
            drop(Mark::set(&path).unwrap());
            Record::default().save(&path).unwrap();
            path
        });
        let paths = |swept: &Swept| swept.left.iter().map(|left| left.path.clone()).collect::<Vec<_>>();
        let mut swept = sweep(parent, ".a.partial-");
        assert_eq!(paths(&swept), [first.clone(), second.clone()]);
        assert_eq!(swept.kept, std::slice::from_ref(&other));
        // They belong to this process now, which is alive.
        let taken = swept.left.remove(0).take().unwrap();
        assert!(sweep(parent, ".a.partial-").left.is_empty());
        drop(swept);
        assert_eq!(paths(&sweep(parent, ".a.partial-")), std::slice::from_ref(&second));
        drop(taken);
        assert_eq!(paths(&sweep(parent, ".a.partial-")).len(), 2);
        assert!(first.exists() && second.exists() && other.exists());
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
