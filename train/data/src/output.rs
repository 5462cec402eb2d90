//! A folder that appears complete or not at all.

use super::info::INFO_FILE;
use super::inputs::Inputs;
use super::owner::{self, Left, Mark, PARTIAL, Swept};
use super::remark::Remark;
use super::{DataError, Result};
use kiln_sys::durable::{self, parent_of};
use std::fs;
use std::path::{Path, PathBuf};

/// A folder under construction: a hidden sibling of the final one. It takes the final name when
/// [`Self::commit`] is called; otherwise it is removed, unless [`Self::keep`] is called.
pub(super) struct OutputFolder {
    target: PathBuf,
    parent: PathBuf,
    temporary: PathBuf,
    mark: Mark,
    /// Folders of preparations that ended early.
    left: Vec<Left>,
    remarks: Vec<Remark>,
    stays: bool,
}

impl OutputFolder {
    /// Checks that `target` is free, and creates the temporary folder. Removes folders of preparations that
    /// ended early without any work to resume.
    pub(super) fn create(target: &Path) -> Result<Self> {
        check_free(target)?;
        // A link remains a link; the folder that it points to is replaced.
        let target = &match target.is_symlink() {
            true => target.canonicalize().map_err(DataError::io("open", target))?,
            false => target.to_path_buf(),
        };
        let Some(name) = target.file_name() else {
            return Err(DataError::Output {
                path: target.to_path_buf(),
                problem: "the path does not end in the name of a folder".to_owned(),
            });
        };
        let parent = parent_of(target).to_owned();
        fs::create_dir_all(&parent).map_err(DataError::io("create", &parent))?;
        let prefix = format!(".{}{PARTIAL}", name.to_string_lossy());
        let Swept { left, left_behind, kept } = owner::sweep(&parent, &prefix);
        let kept = kept.into_iter().map(|path| Remark::KeptWork { path });
        let remarks = left_behind.into_iter().map(Remark::LeftBehind).chain(kept).collect();
        let (temporary, mark) = Self::make(&parent, &prefix)?;
        let target = target.to_path_buf();
        Ok(Self { target, parent, temporary, mark, left, remarks, stays: false })
    }

    /// Replaces the temporary folder, which must be empty, with the folder of a preparation of `inputs` that
    /// ended early, if there is one. Returns the folders of other preparations, which stay.
    pub(super) fn take_over(&mut self, inputs: &Inputs) -> Result<Vec<PathBuf>> {
        let mut left = std::mem::take(&mut self.left);
        if let Some(index) = left.iter().position(|left| left.is_of(inputs)) {
            let (temporary, mark) = left.remove(index).take()?;
            // An empty folder that is left behind does no harm.
            let _ = owner::remove(&self.temporary);
            (self.temporary, self.mark) = (temporary, mark);
        }
        Ok(left.into_iter().map(|left| left.path).collect())
    }

    /// Creates a new temporary folder.
    fn make(parent: &Path, prefix: &str) -> Result<(PathBuf, Mark)> {
        // Picks a name that is unused on every machine that sees this folder: existing folders may belong to
        // anyone.
        let mut index = 0;
        let temporary = loop {
            let temporary = parent.join(format!("{prefix}{}-{index}", std::process::id()));
            match fs::create_dir(&temporary) {
                Ok(()) => break temporary,
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => index += 1,
                Err(error) => return Err(DataError::io("create", &temporary)(error)),
            }
        };
        match Mark::set(&temporary) {
            Ok(mark) => Ok((temporary, mark)),
            Err(error) => {
                let _ = fs::remove_dir_all(&temporary);
                Err(error)
            }
        }
    }

    /// Remarks on other folders under construction next to this one.
    pub(super) fn remarks(&self) -> &[Remark] {
        &self.remarks
    }

    /// Leaves the folder for another preparation to resume.
    pub(super) fn keep(mut self) {
        self.stays = true;
    }

    /// The folder to write the files to.
    pub(super) fn path(&self) -> &Path {
        &self.temporary
    }

    /// Gives the folder its final name. Its files must already be on disk.
    pub(super) fn commit(mut self) -> Result<()> {
        sync_folder(&self.temporary)?;
        // Checked again, because hours may have passed.
        check_free(&self.target)?;
        // Replaces an empty folder, if there is one.
        if let Err(error) = fs::rename(&self.temporary, &self.target) {
            // Another process created the folder a moment ago.
            check_free(&self.target)?;
            return Err(DataError::io("create", &self.target)(error));
        }
        self.stays = true;
        // A process killed just before this leaves a harmless hidden file.
        self.mark.remove_from(&self.target);
        sync_folder(&self.parent)
    }
}

impl Drop for OutputFolder {
    fn drop(&mut self) {
        if !self.stays {
            // An error is already being returned; a second one about cleaning up would hide it.
            let _ = owner::remove(&self.temporary);
        }
    }
}

/// Fails unless `target` does not exist or is an empty folder.
fn check_free(target: &Path) -> Result<()> {
    let refused = |problem| Err(DataError::Output { path: target.to_path_buf(), problem });
    if !target.try_exists().map_err(DataError::io("open", target))? {
        return match target.is_symlink() {
            true => refused("it is a link that leads nowhere".to_owned()),
            false => Ok(()),
        };
    }
    if !target.is_dir() {
        return refused("it is a file".to_owned());
    }
    if target.join(INFO_FILE).exists() {
        return Err(DataError::AlreadyPrepared { path: target.to_path_buf() });
    }
    let mut entries = fs::read_dir(target).map_err(DataError::io("list", target))?;
    match entries.next() {
        None => Ok(()),
        Some(Ok(entry)) => {
            refused(format!("the folder holds other files, such as {}", entry.file_name().to_string_lossy()))
        }
        Some(Err(error)) => Err(DataError::io("list", target)(error)),
    }
}

/// Makes the names inside a folder durable.
fn sync_folder(path: &Path) -> Result<()> {
    durable::sync_folder(path).map_err(DataError::io("write", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn appears_on_commit_and_never_without() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("deep").join("data");
        let output = OutputFolder::create(&target).unwrap();
        fs::write(output.path().join("file"), "x").unwrap();
        assert!(!target.exists());
        drop(output);
        assert!(names(&folder.path().join("deep")).is_empty());

        fs::create_dir(&target).unwrap();
        let output = OutputFolder::create(&target).unwrap();
        fs::write(output.path().join("file"), "x").unwrap();
        output.commit().unwrap();
        assert_eq!(names(&folder.path().join("deep")), ["data"]);
        assert_eq!(names(&target), ["file"]);
    }

    #[test]
    fn a_link_to_a_folder_stays_a_link() {
        let folder = tempfile::tempdir().unwrap();
        let [target, link] = ["data", "link"].map(|name| folder.path().join(name));
        std::os::unix::fs::symlink(&target, &link).unwrap();
        let dangling = OutputFolder::create(&link).map(|_| ()).unwrap_err().to_string();
        assert!(dangling.contains("a link that leads nowhere"), "{dangling}");
        fs::create_dir(&target).unwrap();
        let output = OutputFolder::create(&link).unwrap();
        fs::write(output.path().join("file"), "x").unwrap();
        output.commit().unwrap();
        assert!(link.is_symlink());
        assert_eq!(names(&target), ["file"]);
    }

    /// A name like that of a process with the same id on another machine.
    #[test]
    fn a_name_that_is_taken_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let taken = folder.path().join(format!(".data.partial-{}-0", std::process::id()));
        fs::create_dir(&taken).unwrap();
        fs::write(taken.join("train.bin"), "x").unwrap();
        let output = OutputFolder::create(&folder.path().join("data")).unwrap();
        assert_ne!(output.path(), taken);
        assert!(output.remarks().is_empty());
        output.commit().unwrap();
        assert_eq!(names(&taken), ["train.bin"]);
    }

    #[test]
    fn of_two_that_are_ready_at_once_one_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("data");
        let [first, second] = [0, 1].map(|_| {
            let output = OutputFolder::create(&target).unwrap();
            fs::write(output.path().join(INFO_FILE), "{}").unwrap();
            output
        });
        first.commit().unwrap();
        assert!(matches!(second.commit(), Err(DataError::AlreadyPrepared { .. })));
        assert_eq!(names(folder.path()), ["data"]);
    }

    #[test]
    fn never_replaces_anything() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("data");
        let message = || OutputFolder::create(&target).map(|_| ()).unwrap_err().to_string();
        fs::write(&target, "x").unwrap();
        assert!(message().contains("it is a file"));
        fs::remove_file(&target).unwrap();
        fs::create_dir(&target).unwrap();
        let late = OutputFolder::create(&target).unwrap();
        fs::write(target.join("notes.txt"), "x").unwrap();
        assert!(message().contains("notes.txt"));
        assert!(matches!(late.commit(), Err(DataError::Output { .. })));
        fs::write(target.join("data.json"), "{}").unwrap();
        assert!(message().contains("already holds prepared data"));
        assert!(OutputFolder::create(Path::new("/")).is_err());
        assert_eq!(names(folder.path()), ["data"]);
    }
}
