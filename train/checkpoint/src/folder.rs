//! The checkpoints of a run, the file `latest`, and atomic replacement and removal of folders.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use kiln_sys::durable::{self, parent_of};
use kiln_sys::files;
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};

use super::{CheckpointError, MANIFEST_FILE, Result};

const CHECKPOINTS: &str = "checkpoints";
const FOLDER_PREFIX: &str = "fsdp_cpt";
const LATEST_FILE: &str = "latest";
const PARTIAL: &str = ".partial";
/// Suffix of a checkpoint that a new checkpoint of the same step is about to replace.
const OLD: &str = ".old";
const REMOVED: &str = ".removed";
const NAME_BYTES: u64 = 256;

/// Rule for the checkpoints of a run to keep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Keep {
    /// Number of newest checkpoints to keep; 0 keeps all.
    pub newest: usize,
    /// Also keep checkpoints whose step is a multiple of this number; 0 keeps no others.
    pub every: u64,
}

impl Keep {
    fn always(self, step: u64) -> bool {
        self.every > 0 && step.is_multiple_of(self.every)
    }
}

/// Returns the folder with all checkpoints of the run in `out`.
pub fn checkpoints_folder(out: &Path) -> PathBuf {
    out.join(CHECKPOINTS)
}

/// Returns the path of the checkpoint of `step` in the checkpoints folder `folder`.
pub fn checkpoint_path(folder: &Path, step: u64) -> PathBuf {
    folder.join(format!("{FOLDER_PREFIX}{step}"))
}

pub(super) fn beside(place: &Path) -> PathBuf {
    hidden(place, PARTIAL)
}

fn hidden(place: &Path, suffix: &str) -> PathBuf {
    let name = place.file_name().unwrap_or_default().to_string_lossy();
    place.with_file_name(format!(".{name}{suffix}"))
}

/// Returns the newest complete checkpoint in `folder`. It may be newer than `latest` if a process ended before updating
/// that file. Symbolic links count only if `latest` names no checkpoint.
pub(super) fn newest(folder: &Path) -> Option<PathBuf> {
    let mut all = list(folder);
    let named = named_latest(folder);
    if let Some(named) = named {
        all.retain(|(step, path)| *step > named && !path.is_symlink());
    }
    all.pop().map(|(_, path)| path).or_else(|| Some(checkpoint_path(folder, named?)))
}

fn named_latest(folder: &Path) -> Option<u64> {
    let name = files::read(&folder.join(LATEST_FILE), NAME_BYTES).ok()?;
    let step = step_of(std::str::from_utf8(&name).ok()?.trim().as_ref())?;
    is_complete(&checkpoint_path(folder, step)).then_some(step)
}

/// Returns the entries of `folder` that are named like checkpoints, oldest first, as (step, path).
fn named(folder: &Path) -> Vec<(u64, PathBuf)> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<_> =
        entries.filter_map(|entry| Some((step_of(&entry.file_name())?, entry.path()))).collect();
    found.sort();
    found
}

/// Returns the complete checkpoints in `folder`, oldest first, as (step, path).
fn list(folder: &Path) -> Vec<(u64, PathBuf)> {
    named(folder).into_iter().filter(|(_, path)| is_complete(path)).collect()
}

/// Returns the checkpoints in `folder` that cannot be loaded and the reasons, or `folder` if it cannot be listed.
pub(super) fn unusable(folder: &Path) -> Vec<(PathBuf, String)> {
    match fs::read_dir(folder) {
        Err(error) if !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            vec![(folder.to_owned(), error.to_string())]
        }
        _ => named(folder).into_iter().filter_map(|(_, path)| Some((path.clone(), fault(&path)?))).collect(),
    }
}

fn fault(path: &Path) -> Option<String> {
    match has_manifest(path) {
        Ok(true) => None,
        Ok(false) => Some(format!("it has no {MANIFEST_FILE}, so it is not complete")),
        Err(error) => Some(cannot_read(&error)),
    }
}

pub(super) fn cannot_read(error: &io::Error) -> String {
    format!("cannot read {MANIFEST_FILE}: {error}")
}

/// Reports whether `folder` contains a checkpoint, even an unreadable one.
pub(super) fn has_any(folder: &Path) -> bool {
    named(folder).iter().any(|(_, path)| has_manifest(path).unwrap_or(true))
}

/// Reports whether the folder `path` has a manifest, which is the last file to be written.
pub(super) fn has_manifest(path: &Path) -> io::Result<bool> {
    match fs::metadata(path.join(MANIFEST_FILE)) {
        Ok(_) => Ok(true),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(false),
        Err(error) => Err(error),
    }
}

pub(super) fn is_complete(path: &Path) -> bool {
    has_manifest(path).unwrap_or(false)
}

/// Returns the newest checkpoint next to `path` that has an earlier step and that `is_usable` accepts.
pub(super) fn earlier(path: &Path, is_usable: impl Fn(&Path) -> bool) -> Option<PathBuf> {
    let step = step_of(path.file_name()?)?;
    let neighbours = list(parent_of(path)).into_iter().rev();
    neighbours.filter(|(other, _)| *other < step).map(|(_, path)| path).find(|path| is_usable(path))
}

pub(super) fn point_to(folder: &Path, step: u64) -> Result<()> {
    let new = folder.join(format!(".{LATEST_FILE}{PARTIAL}"));
    write(&new, format!("{FOLDER_PREFIX}{step}").as_bytes())?;
    rename(&new, &folder.join(LATEST_FILE))?;
    sync_folder(folder)
}

/// Sets `latest` to the checkpoint of `step` if that checkpoint is complete. Reports whether `latest` changed.
pub fn fix_latest(folder: &Path, step: u64) -> Result<bool> {
    if !is_complete(&checkpoint_path(folder, step)) || named_latest(folder) == Some(step) {
        return Ok(false);
    }
    point_to(folder, step).map(|()| true)
}

/// Returns the checkpoints up to `step` that count towards [`Keep::newest`], and the one of `step`, without links.
fn own(folder: &Path, keep: Keep, step: u64) -> Vec<(u64, PathBuf)> {
    let is_own = |saved: u64| saved == step || (saved < step && !keep.always(saved));
    list(folder).into_iter().filter(|(saved, path)| is_own(*saved) && !path.is_symlink()).collect()
}

/// Returns the number of checkpoints, and how many the next save after `step` removes because `keep` was reduced.
pub fn surplus(folder: &Path, keep: Keep, step: u64) -> (usize, usize) {
    let own = removable(folder, keep, step);
    let is_more = keep.newest > 0 && own > keep.newest;
    (list(folder).len(), if is_more { own + 1 - keep.newest } else { 0 })
}

/// Returns the number of checkpoints that count towards [`Keep::newest`] when a run resumes at `step`.
pub fn removable(folder: &Path, keep: Keep, step: u64) -> usize {
    own(folder, keep, step).into_iter().filter(|(saved, _)| !keep.always(*saved)).count()
}

/// Removes the checkpoints that `keep` does not keep after a save of `step`. Failures only cause warnings.
pub(super) fn remove_old(folder: &Path, keep: Keep, step: u64) {
    if keep.newest == 0 {
        return;
    }
    for (_, path, _) in left_over(folder).into_iter().filter(|(_, _, suffix)| suffix == REMOVED) {
        warn_unless(remove(&path), &path, "cannot remove the rest of an old checkpoint");
    }
    let mut checkpoints = own(folder, keep, step);
    checkpoints.truncate(checkpoints.len().saturating_sub(keep.newest));
    for (_, path) in checkpoints {
        // Renamed first, so that an interrupted removal never leaves a partial folder named like a checkpoint.
        let aside = hidden(&path, REMOVED);
        let removed = remove(&aside).and_then(|()| rename(&path, &aside)).and_then(|()| remove(&aside));
        warn_unless(removed, &path, "cannot remove an old checkpoint");
    }
}

fn warn_unless(outcome: Result<()>, path: &Path, problem: &str) {
    if let Err(error) = outcome {
        tracing::warn!(path = %path.display(), %error, "{problem}");
    }
}

fn left_over(folder: &Path) -> Vec<(u64, PathBuf, String)> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let found = entries.filter_map(|entry| {
        let name = entry.file_name();
        let name = name.to_str()?.strip_prefix('.')?;
        let (place, suffix) = name.split_at(name.rfind('.')?);
        // Symbolic links belong to the user and are not followed.
        let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
        Some((step_of(place.as_ref())?, entry.path(), suffix.to_owned())).filter(|_| is_folder)
    });
    found.collect()
}

/// Returns the step in the name of a checkpoint folder; `None` for any other name.
pub fn step_of(name: &OsStr) -> Option<u64> {
    let digits = name.to_str()?.strip_prefix(FOLDER_PREFIX)?;
    // No run writes `03` or `+3`, which also parse as numbers.
    digits.parse().ok().filter(|step: &u64| step.to_string() == digits)
}

/// Returns the steps after `step` that have a checkpoint in `folder`, complete or not, in ascending order.
pub fn later_than(folder: &Path, step: u64) -> Vec<u64> {
    named(folder).into_iter().map(|(saved, _)| saved).filter(|saved| *saved > step).collect()
}

/// Moves the checkpoints after `step` to the new folder `aside`. Sets `latest` to `step` if its checkpoint is complete.
pub fn move_later(folder: &Path, step: u64, aside: &Path) -> Result<()> {
    fs::create_dir(aside).map_err(CheckpointError::io("create", aside))?;
    for later in later_than(folder, step) {
        rename(&checkpoint_path(folder, later), &checkpoint_path(aside, later))?;
    }
    sync_folder(aside)?;
    if is_complete(&checkpoint_path(folder, step)) {
        point_to(folder, step)?;
    }
    sync_folder(folder)
}

/// Removes or restores the remains of interrupted saves and removals in `folder`. Must not be called during a save.
pub fn sweep(folder: &Path) {
    for (step, path, suffix) in left_over(folder) {
        let place = checkpoint_path(folder, step);
        let outcome = match suffix.as_str() {
            // A save moved the old checkpoint aside but did not complete the new one.
            OLD if is_complete(&path) && !is_complete(&place) => {
                remove(&place).and_then(|()| rename(&path, &place))
            }
            OLD | PARTIAL | REMOVED => remove(&path),
            _ => Ok(()),
        };
        warn_unless(outcome, &path, "cannot clean up after an interrupted save");
    }
}

pub(super) fn write(path: &Path, content: &[u8]) -> Result<()> {
    durable::write(path, content).map_err(CheckpointError::io("write", path))
}

/// Waits until a folder's entries are on disk, which makes a rename in it durable.
pub(super) fn sync_folder(path: &Path) -> Result<()> {
    durable::sync_folder(path).map_err(CheckpointError::io("sync", path))
}

/// Moves the checkpoint folder `new` to `place`, atomically if the file system allows it, and deletes the old folder.
pub(super) fn replace_folder(new: &Path, place: &Path) -> Result<()> {
    if !place.is_dir() {
        return rename(new, place);
    }
    match renameat2(AT_FDCWD, new, AT_FDCWD, place, RenameFlags::RENAME_EXCHANGE) {
        Ok(()) => remove(new),
        Err(Errno::EINVAL | Errno::ENOSYS) => replace_in_turns(new, place),
        Err(error) => Err(CheckpointError::io("rename to", place)(error.into())),
    }
}

/// Moves the old folder aside first, so that a complete folder exists at every moment.
fn replace_in_turns(new: &Path, place: &Path) -> Result<()> {
    let old = new.with_extension("old");
    // An earlier replacement may have been interrupted while the only complete folder was moved aside.
    if is_complete(place) || !is_complete(&old) {
        remove(&old)?;
        rename(place, &old)?;
    } else {
        remove(place)?;
    }
    if let Err(error) = rename(new, place) {
        // The first error matters more; the next start restores a folder that remains aside.
        let _ = fs::rename(&old, place);
        return Err(error);
    }
    remove(&old)
}

pub(super) fn rename(from: &Path, to: &Path) -> Result<()> {
    fs::rename(from, to).map_err(CheckpointError::io("rename to", to))
}

pub(super) fn remove(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(CheckpointError::io("remove", path)(error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn create(path: &Path, content: &str) {
        fs::create_dir_all(path).unwrap();
        fs::write(path.join(MANIFEST_FILE), content).unwrap();
    }

    fn content(path: &Path) -> String {
        fs::read_to_string(path.join(MANIFEST_FILE)).unwrap()
    }

    fn kept(steps: &[u64], keep: Keep, step: u64) -> Vec<u64> {
        let folder = tempfile::tempdir().unwrap();
        steps.iter().for_each(|step| create(&checkpoint_path(folder.path(), *step), "{}"));
        remove_old(folder.path(), keep, step);
        list(folder.path()).into_iter().map(|(step, _)| step).collect()
    }

    fn names_in(folder: &Path) -> Vec<String> {
        let name = |entry: io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
        let mut names: Vec<_> = fs::read_dir(folder).unwrap().map(name).collect();
        names.sort();
        names
    }

    #[test]
    fn newest_and_every_nth_stay() {
        let steps: Vec<u64> = (1..=12).collect();
        assert_eq!(kept(&steps, Keep { newest: 0, every: 0 }, 12), steps);
        assert_eq!(kept(&steps, Keep { newest: 2, every: 0 }, 12), [11, 12]);
        assert_eq!(kept(&steps, Keep { newest: 2, every: 5 }, 12), [5, 10, 11, 12]);
        // The new checkpoint counts as one of the newest, even if it is kept anyway.
        assert_eq!(kept(&steps[..10], Keep { newest: 2, every: 5 }, 10), [5, 9, 10]);
        // Later checkpoints belong to another run and are kept.
        assert_eq!(kept(&steps, Keep { newest: 1, every: 4 }, 7), [4, 7, 8, 9, 10, 11, 12]);
    }

    #[test]
    fn names_and_links_of_a_user_stay() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let others = ["fsdp_cpt03", "fsdp_cpt+3", "fsdp_cpt3_good"];
        for name in others.iter().chain(&["fsdp_cpt1", "fsdp_cpt3", "fsdp_cpt4", "elsewhere"]) {
            create(&path.join(name), "{}");
        }
        std::os::unix::fs::symlink("elsewhere", path.join("fsdp_cpt2")).unwrap();
        remove_old(path, Keep { newest: 1, every: 0 }, 4);
        let is_there = |name: &&str| path.join(name).join(MANIFEST_FILE).exists();
        assert!(others.iter().chain(&["fsdp_cpt2", "fsdp_cpt4", "elsewhere"]).all(is_there));
        assert!(!["fsdp_cpt1", "fsdp_cpt3"].iter().any(is_there));
        assert_eq!(list(path).len(), 2);
        for name in [".fsdp_cpt03.partial", ".fsdp_cpt+3.old"] {
            fs::create_dir(path.join(name)).unwrap();
        }
        sweep(path);
        assert!(path.join(".fsdp_cpt03.partial").exists() && path.join(".fsdp_cpt+3.old").exists());
    }

    #[test]
    fn old_checkpoints_are_moved_before_removal() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        for name in ["fsdp_cpt1", "fsdp_cpt2", "fsdp_cpt3", ".fsdp_cpt0.removed", ".fsdp_cpt1.removed"] {
            create(&path.join(name), "{}");
        }
        fs::write(path.join(".fsdp_cpt2.removed"), "a file, so that nothing can be moved there").unwrap();
        remove_old(path, Keep { newest: 1, every: 0 }, 3);
        assert_eq!(names_in(path), [".fsdp_cpt2.removed", "fsdp_cpt2", "fsdp_cpt3"]);
        assert!(is_complete(&path.join("fsdp_cpt2")), "whole, or not there");
        create(&path.join(".fsdp_cpt1.removed"), "{}");
        sweep(path);
        assert_eq!(names_in(path), [".fsdp_cpt2.removed", "fsdp_cpt2", "fsdp_cpt3"]);
    }

    #[test]
    fn newest_is_latest_or_a_newer_one() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("checkpoints");
        [2, 4, 6].iter().for_each(|step| create(&checkpoint_path(&folder, *step), "{}"));
        let newest = || newest(&folder).map(|path| path.file_name().unwrap().to_owned());
        let named = |latest: &str| {
            fs::write(folder.join(LATEST_FILE), latest).unwrap();
            newest().unwrap().into_string().unwrap()
        };
        assert_eq!(newest().unwrap(), "fsdp_cpt6");
        assert_eq!(named("fsdp_cpt6\n"), "fsdp_cpt6");
        // The process ended before it updated `latest`.
        assert_eq!(named("fsdp_cpt4"), "fsdp_cpt6");
        assert!(fix_latest(&folder, 6).unwrap() && !fix_latest(&folder, 6).unwrap());
        assert_eq!(fs::read_to_string(folder.join(LATEST_FILE)).unwrap(), "fsdp_cpt6");
        // Another run's checkpoint, linked by a user, counts only if `latest` names no checkpoint.
        std::os::unix::fs::symlink("fsdp_cpt2", checkpoint_path(&folder, 9)).unwrap();
        assert_eq!(named("fsdp_cpt6"), "fsdp_cpt6");
        assert_eq!(named("fsdp_cpt9"), "fsdp_cpt9");
        fs::remove_file(checkpoint_path(&folder, 9)).unwrap();
        // `latest` never leads to another folder, and an invalid name is ignored.
        create(&root.path().join("fsdp_cpt8"), "{}");
        let absolute = root.path().join("fsdp_cpt8").display().to_string();
        for elsewhere in ["../fsdp_cpt8", &absolute, "fsdp_cpt7", "fsdp_cpt03", "", "\u{1b}[2J"] {
            assert_eq!(named(elsewhere), "fsdp_cpt6", "{elsewhere}");
        }
    }

    #[test]
    fn sweep_removes_only_its_own_remains() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let others = [".fsdp_cptmine.partial", ".mine.partial", "fsdp_cpt2"];
        for name in [".fsdp_cpt4.partial", ".fsdp_cpt4.old"].iter().chain(&others) {
            fs::create_dir(path.join(name)).unwrap();
        }
        fs::write(path.join(".latest.partial"), "").unwrap();
        sweep(path);
        let [mine, other, checkpoint] = others;
        assert_eq!(names_in(path), [mine, ".latest.partial", other, checkpoint]);
    }

    #[test]
    fn interrupted_replacement_is_undone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        for name in [".fsdp_cpt4.partial", ".fsdp_cpt4.old"] {
            create(&path.join(name), name);
        }
        sweep(path);
        assert_eq!(fs::read_dir(path).unwrap().count(), 1);
        assert_eq!(content(&path.join("fsdp_cpt4")), ".fsdp_cpt4.old");
    }

    #[test]
    fn later_checkpoints_are_moved() {
        let folder = tempfile::tempdir().unwrap();
        let checkpoints = folder.path().join("checkpoints");
        [2, 4, 6].iter().for_each(|step| create(&checkpoint_path(&checkpoints, *step), "{}"));
        fs::create_dir(checkpoint_path(&checkpoints, 10)).unwrap();
        point_to(&checkpoints, 6).unwrap();
        assert_eq!(later_than(&checkpoints, 4), [6, 10]);
        let aside = folder.path().join("aside");
        move_later(&checkpoints, 4, &aside).unwrap();
        assert_eq!(later_than(&checkpoints, 0), [2, 4]);
        assert_eq!(later_than(&aside, 0), [6, 10]);
        assert_eq!(fs::read_to_string(checkpoints.join(LATEST_FILE)).unwrap(), "fsdp_cpt4");
    }

    #[test]
    fn one_of_two_folders_stays_whatever_fails() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let (new, place, old) = (path(".fsdp_cpt4.partial"), path("fsdp_cpt4"), path(".fsdp_cpt4.old"));
        create(&place, "old");
        assert!(replace_in_turns(&new, &place).is_err());
        assert_eq!(content(&place), "old");
        create(&new, "new");
        replace_in_turns(&new, &place).unwrap();
        assert_eq!(content(&place), "new");
        assert!(!new.exists() && !old.exists());
        // A partial folder is at `place`, while the only complete folder is aside.
        fs::rename(&place, &old).unwrap();
        fs::create_dir(&place).unwrap();
        assert!(replace_in_turns(&new, &place).is_err());
        assert_eq!(content(&place), "new");
        // The folder aside is obsolete if `place` has a complete one.
        create(&old, "older");
        create(&new, "newest");
        replace_in_turns(&new, &place).unwrap();
        assert_eq!(content(&place), "newest");
        assert!(!old.exists());
    }

    #[test]
    fn latest_does_not_replace_a_folder() {
        let folder = tempfile::tempdir().unwrap();
        let latest = folder.path().join(LATEST_FILE);
        fs::create_dir(&latest).unwrap();
        fs::write(latest.join("mine"), "").unwrap();
        assert!(point_to(folder.path(), 1).is_err());
        assert!(latest.join("mine").exists());
    }
}
