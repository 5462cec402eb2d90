use super::info::INFO_FILE;
use super::{DataError, Result};
use kiln_sys::StagingFolder;
use kiln_sys::durable::{self, parent_of};
use std::fs;
use std::path::{Path, PathBuf};

/// A hidden folder, renamed by [`Self::commit`] and removed when dropped. If several processes prepare the same folder,
/// the first wins and the others fail with [`DataError::AlreadyPrepared`].
pub(super) struct OutputFolder {
    target: PathBuf,
    staging: StagingFolder,
}

impl OutputFolder {
    /// Creates the hidden folder, and removes those that killed processes left for the same `target`.
    pub(super) fn create(target: &Path) -> Result<Self> {
        check_free(target)?;
        // A link remains a link; the folder that it points to is replaced.
        let target = match target.is_symlink() {
            true => target.canonicalize().map_err(DataError::io("open", target))?,
            false => target.to_path_buf(),
        };
        if target.file_name().is_none() {
            let problem = "the path does not end in the name of a folder".to_owned();
            return Err(DataError::Output { path: target, problem });
        }
        let parent = parent_of(&target);
        fs::create_dir_all(parent).map_err(DataError::io("create", parent))?;
        let staging = StagingFolder::create(&target).map_err(DataError::io("write next to", &target))?;
        Ok(Self { target, staging })
    }

    pub(super) fn path(&self) -> &Path {
        self.staging.path()
    }

    /// Renames the folder to its final name. Its files must already be on disk.
    pub(super) fn commit(self) -> Result<()> {
        sync_folder(self.path())?;
        check_free(&self.target)?;
        // `rename` replaces an empty folder, if there is one.
        if let Err(error) = fs::rename(self.path(), &self.target) {
            // Another process may have just created the folder.
            check_free(&self.target)?;
            return Err(DataError::io("create", &self.target)(error));
        }
        self.staging.gone();
        sync_folder(parent_of(&self.target))
    }
}

/// Fails if `target` exists, unless it is an empty folder.
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
    fn appears_only_on_commit() {
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

    #[test]
    fn only_the_first_of_two_gets_the_name() {
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
