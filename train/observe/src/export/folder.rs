//! Folders that exports are written to.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use kiln_sys::durable::parent_of;

use super::error::ExportError;

/// Creates `folder`, which must not exist yet, and lets `write` fill it. If that fails, the folder is
/// removed: half an export would look like a whole one.
pub(super) fn fill(
    folder: PathBuf,
    write: impl FnOnce(&Path) -> io::Result<()>,
) -> Result<PathBuf, ExportError> {
    fs::create_dir_all(parent_of(&folder)).map_err(ExportError::io("create", &folder))?;
    match fs::create_dir(&folder) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => return Err(ExportError::Taken(folder)),
        created => created.map_err(ExportError::io("create", &folder))?,
    }
    if let Err(error) = write(&folder) {
        // The cause of the failed write matters more than that of the failed removal.
        let _ = fs::remove_dir_all(&folder);
        return Err(ExportError::io("write to", &folder)(error));
    }
    Ok(folder)
}
