//! A new folder that appears complete or not at all.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use kiln_sys::StagingFolder;
use kiln_sys::durable::{self, parent_of};
use serde_json::Value;

use super::HuggingFaceError;

/// A folder under construction next to its place; removed unless [`NewFolder::commit`] is called.
pub(super) struct NewFolder {
    place: PathBuf,
    beside: StagingFolder,
}

impl NewFolder {
    /// Creates a folder for `place`, which must not exist.
    pub(super) fn create(place: &Path) -> Result<Self, HuggingFaceError> {
        check_free(place)?;
        if place.file_name().is_none() {
            return Err(HuggingFaceError::Occupied { path: place.to_owned() });
        }
        let parent = parent_of(place);
        fs::create_dir_all(parent).map_err(HuggingFaceError::io("create", parent))?;
        let beside = StagingFolder::create(place).map_err(HuggingFaceError::io("write beside", place))?;
        Ok(NewFolder { place: place.to_owned(), beside })
    }

    /// Returns the path at which to write the files.
    pub(super) fn path(&self) -> &Path {
        self.beside.path()
    }

    /// Writes a file and waits until it is on the disk.
    pub(super) fn write(&self, name: &str, content: &[u8]) -> Result<(), HuggingFaceError> {
        let path = self.path().join(name);
        let mut file = File::create(&path).map_err(HuggingFaceError::io("create", &path))?;
        file.write_all(content).and_then(|()| file.sync_all()).map_err(HuggingFaceError::io("write", &path))
    }

    /// Writes indented JSON.
    pub(super) fn write_json(&self, name: &str, value: &Value) -> Result<(), HuggingFaceError> {
        self.write(name, format!("{value:#}\n").as_bytes())
    }

    /// Moves the folder to its place. Its files must be on the disk already.
    pub(super) fn commit(self) -> Result<(), HuggingFaceError> {
        sync_folder(self.path())?;
        // Checked again, because writing a large model takes time.
        check_free(&self.place)?;
        fs::rename(self.path(), &self.place).map_err(HuggingFaceError::io("create", &self.place))?;
        self.beside.gone();
        sync_folder(parent_of(&self.place))
    }
}

/// Fails if there is anything at `place`.
pub fn check_free(place: &Path) -> Result<(), HuggingFaceError> {
    match fs::symlink_metadata(place) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(HuggingFaceError::io("open", place)(error)),
        Ok(_) => Err(HuggingFaceError::Occupied { path: place.to_owned() }),
    }
}

/// A rename is durable once its folder is synced.
fn sync_folder(path: &Path) -> Result<(), HuggingFaceError> {
    durable::sync_folder(path).map_err(HuggingFaceError::io("sync", path))
}
