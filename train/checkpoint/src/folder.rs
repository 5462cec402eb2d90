//! The checkpoints of a run, and the latest of them.

use std::ffi::OsStr;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use kiln_sys::durable::parent_of;
use kiln_sys::files;

use super::disk::{self, is_whole};
use super::{CheckpointError, MANIFEST_FILE, Result};

/// Folder of all checkpoints inside a run folder.
const CHECKPOINTS: &str = "checkpoints";
const FOLDER_PREFIX: &str = "fsdp_cpt";
const LATEST_FILE: &str = "latest";
/// Suffix of folders that are being written.
const PARTIAL: &str = ".partial";
/// Suffix of a checkpoint that a new one of its step is about to replace.
const OLD: &str = ".old";
/// Suffix of a checkpoint that is being removed.
const REMOVED: &str = ".removed";
/// Upper limit of the bytes of a checkpoint's name.
const NAME_BYTES: u64 = 256;

/// Selects the checkpoints of a run to keep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Keep {
    /// Number of newest checkpoints to keep; 0 for all.
    pub newest: usize,
    /// Also keep checkpoints whose step is a multiple of this; 0 for none.
    pub every: u64,
}

/// Returns the folder of all checkpoints of the run in `out`.
pub fn folder_of_run(out: &Path) -> PathBuf {
    out.join(CHECKPOINTS)
}

/// Returns the path of the checkpoint of `step` in the folder of all checkpoints.
pub fn place_of(folder: &Path, step: u64) -> PathBuf {
    folder.join(format!("{FOLDER_PREFIX}{step}"))
}

/// Returns the path at which it is written until it is complete.
pub(super) fn beside(place: &Path) -> PathBuf {
    hidden(place, PARTIAL)
}

/// Returns the hidden name of a checkpoint, with a suffix that indicates its state.
fn hidden(place: &Path, ending: &str) -> PathBuf {
    let name = place.file_name().unwrap_or_default().to_string_lossy();
    place.with_file_name(format!(".{name}{ending}"))
}

/// Returns the newest complete checkpoint in `folder`: the one named by `latest`, or a newer one whose
/// process ended between completing the checkpoint and writing `latest`. A user's links count only if
/// `latest` names no checkpoint.
pub(super) fn newest(folder: &Path) -> Option<PathBuf> {
    let mut all = list(folder);
    match named_latest(folder) {
        Some(named) => {
            all.retain(|(step, path)| *step > named && !path.is_symlink());
            Some(all.pop().map_or_else(|| place_of(folder, named), |(_, path)| path))
        }
        None => all.pop().map(|(_, path)| path),
    }
}

/// Returns the step of the checkpoint named by `latest`, if there is one. A path instead of a name is
/// ignored.
fn named_latest(folder: &Path) -> Option<u64> {
    let name = files::read(&folder.join(LATEST_FILE), NAME_BYTES).ok()?;
    let step = step_of(std::str::from_utf8(&name).ok()?.trim().as_ref())?;
    is_whole(&place_of(folder, step)).then_some(step)
}

/// Returns the entries of `folder` with names of checkpoints, as (step, path).
fn named(folder: &Path) -> impl Iterator<Item = (u64, PathBuf)> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| Some((step_of(&entry.file_name())?, entry.path())))
}

/// Returns the complete checkpoints in `folder`, oldest first, as (step, path).
fn list(folder: &Path) -> Vec<(u64, PathBuf)> {
    let mut found: Vec<_> = named(folder).filter(|(_, path)| is_whole(path)).collect();
    found.sort();
    found
}

/// Returns the folders in `folder` with names of checkpoints that cannot be loaded, oldest first, and the
/// fault of each. If `folder` itself cannot be listed, returns `folder`.
pub(super) fn unusable(folder: &Path) -> Vec<(PathBuf, String)> {
    match fs::read_dir(folder) {
        Err(error) if !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            return vec![(folder.to_owned(), error.to_string())];
        }
        _ => {}
    }
    let mut found: Vec<_> = named(folder).collect();
    found.sort();
    found.into_iter().filter_map(|(_, path)| objection(&path).map(|why| (path, why))).collect()
}

/// Returns the fault of the checkpoint at `path`, as far as its manifest's file shows.
pub(super) fn objection(path: &Path) -> Option<String> {
    match disk::look(path) {
        Ok(true) => None,
        Ok(false) => Some(format!("it has no {MANIFEST_FILE}, so it is not complete")),
        Err(error) => Some(format!("cannot read {MANIFEST_FILE}: {error}")),
    }
}

/// Returns whether there is a checkpoint in `folder`, even an unreadable one.
pub(super) fn has_any(folder: &Path) -> bool {
    named(folder).any(|(_, path)| disk::look(&path).unwrap_or(true))
}

/// Returns the newest checkpoint next to the one at `path`, of an earlier step, that `is_usable` accepts.
pub(super) fn earlier(path: &Path, is_usable: impl Fn(&Path) -> bool) -> Option<PathBuf> {
    let step = step_of(path.file_name()?)?;
    let beside = list(parent_of(path)).into_iter().rev();
    beside.filter(|(other, _)| *other < step).map(|(_, path)| path).find(|path| is_usable(path))
}

/// Makes `latest` name the checkpoint of `step`.
pub(super) fn point_to(folder: &Path, step: u64) -> Result<()> {
    let beside = folder.join(format!(".{LATEST_FILE}{PARTIAL}"));
    let name = format!("{FOLDER_PREFIX}{step}");
    disk::write(&beside, name.as_bytes())?;
    disk::rename(&beside, &folder.join(LATEST_FILE))?;
    disk::sync_folder(folder)
}

/// Makes `latest` name the checkpoint of `step`, from which a run resumes, unless it does already. Returns
/// whether it changed.
pub fn mend_latest(folder: &Path, step: u64) -> Result<bool> {
    if !is_whole(&place_of(folder, step)) || named_latest(folder) == Some(step) {
        return Ok(false);
    }
    point_to(folder, step).map(|()| true)
}

/// Returns the checkpoints up to that of `step` of which only the newest are kept, and that of `step` itself.
/// Later ones do not belong to this run, and links belong to a user.
fn own(folder: &Path, keep: Keep, step: u64) -> Vec<(u64, PathBuf)> {
    let mut checkpoints = list(folder);
    let stays = |saved: u64| keep.every > 0 && saved.is_multiple_of(keep.every);
    checkpoints
        .retain(|(saved, path)| !path.is_symlink() && (*saved == step || (*saved < step && !stays(*saved))));
    checkpoints
}

/// Returns the number of checkpoints at the start of a run that resumes after `step` steps, and how many of
/// them its next save removes because `keep` is smaller than when they were written; 0 if it removes no more
/// than a run that has always had `keep`.
pub fn surplus(folder: &Path, keep: Keep, step: u64) -> (usize, usize) {
    let there = list(folder).len();
    let own = removable(folder, keep, step);
    let is_more = keep.newest > 0 && own > keep.newest;
    (there, if is_more { own + 1 - keep.newest } else { 0 })
}

/// Returns the number of checkpoints, at the start of a run that resumes after `step` steps, of which only
/// the newest are kept.
pub fn removable(folder: &Path, keep: Keep, step: u64) -> usize {
    let mut own = own(folder, keep, step);
    own.retain(|(saved, _)| keep.every == 0 || !saved.is_multiple_of(keep.every));
    own.len()
}

/// Removes the checkpoints that are not kept, now that the one of `step` has been written, and remains of
/// earlier removals. Failures only cause warnings.
pub(super) fn remove_old(folder: &Path, keep: Keep, step: u64) {
    if keep.newest == 0 {
        return;
    }
    for (_, path) in left_over(folder, |kind| kind == REMOVED) {
        warn_unless(disk::remove(&path), &path, "cannot remove the rest of an old checkpoint");
    }
    let mut checkpoints = own(folder, keep, step);
    let surplus = checkpoints.len().saturating_sub(keep.newest);
    for (_, path) in checkpoints.drain(..surplus) {
        let removed = disk::remove_by_way_of(&path, &hidden(&path, REMOVED));
        warn_unless(removed, &path, "cannot remove an old checkpoint");
    }
}

fn warn_unless(outcome: Result<()>, path: &Path, what: &str) {
    if let Err(error) = outcome {
        tracing::warn!(path = %path.display(), %error, "{what}");
    }
}

/// Returns the remains of interrupted saves and removals in `folder`, of the wanted kinds: steps and paths.
fn left_over(folder: &Path, is_wanted: impl Fn(&str) -> bool) -> Vec<(u64, PathBuf)> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let found = entries.filter_map(|entry| {
        let name = entry.file_name();
        let name = name.to_str()?.strip_prefix('.')?;
        let (place, ending) = name.split_at(name.rfind('.')?);
        let step = step_of(place.as_ref())?;
        // A user's link is not followed.
        let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
        (is_folder && is_wanted(ending)).then(|| (step, entry.path()))
    });
    found.collect()
}

/// Returns the step in the name of a checkpoint, if a run could have chosen the name.
pub fn step_of(name: &OsStr) -> Option<u64> {
    let digits = name.to_str()?.strip_prefix(FOLDER_PREFIX)?;
    // `03` and `+3` are numbers as well, but not our names.
    digits.parse().ok().filter(|step: &u64| step.to_string() == digits)
}

/// Returns the steps after `step` with a checkpoint in `folder`, complete or not, in order.
pub fn later_than(folder: &Path, step: u64) -> Vec<u64> {
    let mut steps: Vec<_> = named(folder).map(|(saved, _)| saved).filter(|saved| *saved > step).collect();
    steps.sort_unstable();
    steps
}

/// Moves the checkpoints of steps after `step` to the new folder `aside`. The checkpoint of `step`, if there
/// is one, becomes the latest.
pub fn move_later(folder: &Path, step: u64, aside: &Path) -> Result<()> {
    fs::create_dir(aside).map_err(CheckpointError::io("create", aside))?;
    for later in later_than(folder, step) {
        let to = place_of(aside, later);
        fs::rename(place_of(folder, later), &to).map_err(CheckpointError::io("rename to", &to))?;
    }
    disk::sync_folder(aside)?;
    if is_whole(&place_of(folder, step)) {
        point_to(folder, step)?;
    }
    disk::sync_folder(folder)
}

/// Cleans up the remains of interrupted saves and removals in `folder`. Must not be called during a save.
pub fn sweep(folder: &Path) {
    for (step, path) in left_over(folder, |kind| kind == OLD) {
        let place = place_of(folder, step);
        // It was moved out of the way of a new checkpoint, which was never completed.
        let outcome = if is_whole(&path) && !is_whole(&place) {
            // A part of the checkpoint that it made way for may be there.
            disk::remove(&place)
                .and_then(|()| fs::rename(&path, &place).map_err(CheckpointError::io("rename to", &place)))
        } else {
            disk::remove(&path)
        };
        warn_unless(outcome, &path, "cannot clear up an interrupted save");
    }
    for (_, path) in left_over(folder, |kind| kind == PARTIAL || kind == REMOVED) {
        warn_unless(disk::remove(&path), &path, "cannot clear up an interrupted save");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(steps: &[u64], keep: Keep, step: u64) -> Vec<u64> {
        let folder = tempfile::tempdir().unwrap();
        for step in steps {
            let place = place_of(folder.path(), *step);
            fs::create_dir(&place).unwrap();
            fs::write(place.join(MANIFEST_FILE), "{}").unwrap();
        }
        remove_old(folder.path(), keep, step);
        list(folder.path()).into_iter().map(|(step, _)| step).collect()
    }

    /// Returns the names in a folder, in order.
    fn names_in(folder: &Path) -> Vec<String> {
        let name = |entry: std::io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
        let mut names: Vec<_> = fs::read_dir(folder).unwrap().map(name).collect();
        names.sort();
        names
    }

    #[test]
    fn the_newest_stay_and_every_nth_besides() {
        let steps: Vec<u64> = (1..=12).collect();
        assert_eq!(kept(&steps, Keep { newest: 0, every: 0 }, 12), steps);
        assert_eq!(kept(&steps, Keep { newest: 2, every: 0 }, 12), [11, 12]);
        assert_eq!(kept(&steps, Keep { newest: 2, every: 5 }, 12), [5, 10, 11, 12]);
        // The new checkpoint counts as one of the newest, even if it is kept anyway.
        assert_eq!(kept(&steps[..10], Keep { newest: 2, every: 5 }, 10), [5, 9, 10]);
        // Later checkpoints are not this run's to remove.
        assert_eq!(kept(&steps, Keep { newest: 1, every: 4 }, 7), [4, 7, 8, 9, 10, 11, 12]);
    }

    #[test]
    fn names_and_links_of_a_user_stay() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let others = ["fsdp_cpt03", "fsdp_cpt+3", "fsdp_cpt3_good"];
        for name in others.iter().chain(&["fsdp_cpt1", "fsdp_cpt3", "fsdp_cpt4", "elsewhere"]) {
            fs::create_dir(path.join(name)).unwrap();
            fs::write(path.join(name).join(MANIFEST_FILE), "{}").unwrap();
        }
        std::os::unix::fs::symlink("elsewhere", path.join("fsdp_cpt2")).unwrap();
        remove_old(path, Keep { newest: 1, every: 0 }, 4);
        let is_there = |name: &&str| path.join(name).join(MANIFEST_FILE).exists();
        assert!(others.iter().chain(&["fsdp_cpt2", "fsdp_cpt4", "elsewhere"]).all(is_there));
        assert!(!["fsdp_cpt1", "fsdp_cpt3"].iter().any(is_there));
        // Another run's checkpoint may be resumed through a link.
        assert_eq!(list(path).len(), 2);
        for name in [".fsdp_cpt03.partial", ".fsdp_cpt+3.old"] {
            fs::create_dir(path.join(name)).unwrap();
        }
        sweep(path);
        assert!(path.join(".fsdp_cpt03.partial").exists() && path.join(".fsdp_cpt+3.old").exists());
    }

    /// No matter what interrupts a removal, no part of a checkpoint stays among the complete ones.
    #[test]
    fn an_old_checkpoint_is_moved_away_before_it_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let create = |name: &str| {
            fs::create_dir(path.join(name)).unwrap();
            fs::write(path.join(name).join(MANIFEST_FILE), "{}").unwrap();
        };
        for name in ["fsdp_cpt1", "fsdp_cpt2", "fsdp_cpt3", ".fsdp_cpt0.removed"] {
            create(name);
        }
        // The remains of a killed process, and of a removal that always fails.
        create(".fsdp_cpt1.removed");
        fs::write(path.join(".fsdp_cpt2.removed"), "a file, so that nothing can be moved there").unwrap();
        remove_old(path, Keep { newest: 1, every: 0 }, 3);
        assert_eq!(names_in(path), [".fsdp_cpt2.removed", "fsdp_cpt2", "fsdp_cpt3"]);
        assert!(is_whole(&path.join("fsdp_cpt2")), "whole, or not there");
        create(".fsdp_cpt1.removed");
        sweep(path);
        assert_eq!(names_in(path), [".fsdp_cpt2.removed", "fsdp_cpt2", "fsdp_cpt3"]);
    }

    #[test]
    fn the_newest_is_the_one_that_latest_names_or_one_that_is_newer() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("checkpoints");
        for step in [2, 4, 6] {
            fs::create_dir_all(place_of(&folder, step)).unwrap();
            fs::write(place_of(&folder, step).join(MANIFEST_FILE), "{}").unwrap();
        }
        let newest = || newest(&folder).map(|path| path.file_name().unwrap().to_owned());
        let named = |latest: &str| {
            fs::write(folder.join(LATEST_FILE), latest).unwrap();
            newest().unwrap().into_string().unwrap()
        };
        assert_eq!(newest().unwrap(), "fsdp_cpt6");
        assert_eq!(named("fsdp_cpt6\n"), "fsdp_cpt6");
        // The process ended before it had written `latest`.
        assert_eq!(named("fsdp_cpt4"), "fsdp_cpt6");
        assert!(mend_latest(&folder, 6).unwrap() && !mend_latest(&folder, 6).unwrap());
        assert_eq!(fs::read_to_string(folder.join(LATEST_FILE)).unwrap(), "fsdp_cpt6");
        // Another run's checkpoint, linked by a user, counts only if nothing else does.
        std::os::unix::fs::symlink("fsdp_cpt2", place_of(&folder, 9)).unwrap();
        assert_eq!(named("fsdp_cpt6"), "fsdp_cpt6");
        assert_eq!(named("fsdp_cpt9"), "fsdp_cpt9");
        fs::remove_file(place_of(&folder, 9)).unwrap();
        // A name never leads to another folder, and an invalid name is ignored.
        fs::create_dir(root.path().join("fsdp_cpt8")).unwrap();
        fs::write(root.path().join("fsdp_cpt8").join(MANIFEST_FILE), "{}").unwrap();
        let absolute = root.path().join("fsdp_cpt8").display().to_string();
        for elsewhere in ["../fsdp_cpt8", &absolute, "fsdp_cpt7", "fsdp_cpt03", "", "\u{1b}[2J"] {
            assert_eq!(named(elsewhere), "fsdp_cpt6", "{elsewhere}");
        }
    }

    #[test]
    fn only_what_an_interrupted_save_has_left_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let others = [".fsdp_cptmine.partial", ".mine.partial", "fsdp_cpt2"];
        for name in [".fsdp_cpt4.partial", ".fsdp_cpt4.old"].iter().chain(&others) {
            fs::create_dir(path.join(name)).unwrap();
        }
        fs::write(path.join(".latest.partial"), "").unwrap();
        sweep(path);
        assert_eq!(
            names_in(path),
            [".fsdp_cptmine.partial", ".latest.partial", ".mine.partial", "fsdp_cpt2"]
        );
    }

    /// Interrupted between its two renames, on a file system that cannot exchange two folders.
    #[test]
    fn a_checkpoint_that_was_about_to_be_replaced_comes_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        for name in [".fsdp_cpt4.partial", ".fsdp_cpt4.old"] {
            fs::create_dir(path.join(name)).unwrap();
            fs::write(path.join(name).join(MANIFEST_FILE), name).unwrap();
        }
        sweep(path);
        assert_eq!(fs::read_dir(path).unwrap().count(), 1);
        let manifest = fs::read_to_string(path.join("fsdp_cpt4").join(MANIFEST_FILE)).unwrap();
        assert_eq!(manifest, ".fsdp_cpt4.old");
    }

    #[test]
    fn later_checkpoints_are_moved_whole_or_not() {
        let folder = tempfile::tempdir().unwrap();
        let checkpoints = folder.path().join("checkpoints");
        for step in [2, 4, 6, 10] {
            fs::create_dir_all(place_of(&checkpoints, step)).unwrap();
            if step != 10 {
                fs::write(place_of(&checkpoints, step).join(MANIFEST_FILE), "{}").unwrap();
            }
        }
        point_to(&checkpoints, 6).unwrap();
        assert_eq!(later_than(&checkpoints, 4), [6, 10]);
        let aside = folder.path().join("aside");
        move_later(&checkpoints, 4, &aside).unwrap();
        assert_eq!(later_than(&checkpoints, 0), [2, 4]);
        assert_eq!(later_than(&aside, 0), [6, 10]);
        assert_eq!(fs::read_to_string(checkpoints.join(LATEST_FILE)).unwrap(), "fsdp_cpt4");
    }
}
