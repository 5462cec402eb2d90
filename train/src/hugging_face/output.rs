//! A new folder that appears complete or not at all.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::HuggingFaceError;
use crate::checkpoint::parent_of;
use crate::files::{self, MAX_WHOLE};

/// A folder under construction beside its place; removed unless [`NewFolder::commit`] is called.
pub(super) struct NewFolder {
    place: PathBuf,
    beside: PathBuf,
    committed: bool,
}

impl NewFolder {
    /// Starts one for `place`, which must not exist.
    pub(super) fn create(place: &Path) -> Result<Self, HuggingFaceError> {
        check_free(place)?;
        let Some(name) = place.file_name() else {
            return Err(HuggingFaceError::Occupied { path: place.to_owned() });
        };
        let parent = parent_of(place);
        fs::create_dir_all(parent).map_err(HuggingFaceError::io("create", parent))?;
        // A name that nobody has: what is there already may be anyone's.
        let mut index = 0;
        let beside = loop {
            let name = name.to_string_lossy();
            let beside = parent.join(format!(".{name}.kiln-{}-{index}", std::process::id()));
            match fs::create_dir(&beside) {
                Ok(()) => break beside,
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => index += 1,
                Err(error) => return Err(HuggingFaceError::io("create", &beside)(error)),
            }
        };
        Ok(NewFolder { place: place.to_owned(), beside, committed: false })
    }

    /// Fails if `place` exists.
    pub(super) fn check_free(place: &Path) -> Result<(), HuggingFaceError> {
        check_free(place)
    }

    /// Where to write the files.
    pub(super) fn path(&self) -> &Path {
        &self.beside
    }

    /// Writes a file and waits until it is on the disk.
    pub(super) fn write(&self, name: &str, content: &[u8]) -> Result<(), HuggingFaceError> {
        let path = self.beside.join(name);
        let mut file = File::create(&path).map_err(HuggingFaceError::io("create", &path))?;
        file.write_all(content)
            .and_then(|()| file.sync_all())
            .map_err(HuggingFaceError::io("write", &path))
    }

    /// Writes JSON for people.
    pub(super) fn write_json(&self, name: &str, value: &Value) -> Result<(), HuggingFaceError> {
        self.write(name, format!("{value:#}\n").as_bytes())
    }

    /// Copies those of `names` that are in `from`. Returns them.
    pub(super) fn carry<'a>(
        &self,
        from: &Path,
        names: &[&'a str],
    ) -> Result<Vec<&'a str>, HuggingFaceError> {
        let mut carried = Vec::new();
        for name in names {
            let path = from.join(name);
            HuggingFaceError::check_inside(from, name)?;
            if path.is_file() {
                let read = files::read(&path, MAX_WHOLE);
                let content = read.map_err(HuggingFaceError::io("read", &path))?;
                self.write(name, &content)?;
                carried.push(*name);
            }
        }
        Ok(carried)
    }

    /// What has been written, in a fixed order.
    pub(super) fn files(&self) -> Result<Vec<PathBuf>, HuggingFaceError> {
        let entries = fs::read_dir(&self.beside).and_then(|entries| {
            entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<Vec<_>>>()
        });
        let mut files = entries.map_err(HuggingFaceError::io("read", &self.beside))?;
        files.sort();
        Ok(files)
    }

    /// Gives the folder its place. Its files must be on the disk already.
    pub(super) fn commit(mut self) -> Result<(), HuggingFaceError> {
        sync_folder(&self.beside)?;
        // Again, because a large model takes its time.
        check_free(&self.place)?;
        fs::rename(&self.beside, &self.place)
            .map_err(HuggingFaceError::io("create", &self.place))?;
        self.committed = true;
        sync_folder(parent_of(&self.place))
    }
}

impl Drop for NewFolder {
    fn drop(&mut self) {
        if !self.committed {
            // An error is on its way already; one more about tidying up would hide it.
            let _ = fs::remove_dir_all(&self.beside);
        }
    }
}

fn check_free(place: &Path) -> Result<(), HuggingFaceError> {
    match fs::symlink_metadata(place) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(HuggingFaceError::io("open", place)(error)),
        Ok(_) => Err(HuggingFaceError::Occupied { path: place.to_owned() }),
    }
}

/// A rename is durable once its folder is synced.
fn sync_folder(path: &Path) -> Result<(), HuggingFaceError> {
    File::open(path)
        .and_then(|folder| folder.sync_all())
        .map_err(HuggingFaceError::io("sync", path))
}
