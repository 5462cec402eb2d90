//! Files that never replace an existing file.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use kiln_sys::durable::{parent_of, write_new_beside};

/// Writes a new file, and creates missing folders. If `path` exists, appends `-2`, `-3` and so on to the name.
/// Returns the path of the file.
pub(crate) fn write_new(path: &Path, content: &[u8]) -> io::Result<PathBuf> {
    fs::create_dir_all(parent_of(path))?;
    for index in 1.. {
        let path = numbered(path, index);
        // Checked first, to avoid writing long content for nothing.
        if path.symlink_metadata().is_ok() {
            continue;
        }
        match write_new_beside(&path, content) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            written => return written.map(|()| path),
        }
    }
    Err(ErrorKind::AlreadyExists.into())
}

fn numbered(path: &Path, index: u64) -> PathBuf {
    if index == 1 {
        return path.to_owned();
    }
    let mut name = path.file_stem().unwrap_or_default().to_owned();
    name.push(format!("-{index}"));
    if let Some(extension) = path.extension() {
        name.push(".");
        name.push(extension);
    }
    path.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn existing_files_stay() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("traces/a.b.txt");
        let names = ["1", "2", "3"].map(|content| write_new(&path, content.as_bytes()).unwrap());
        let expected = ["a.b.txt", "a.b-2.txt", "a.b-3.txt"];
        for ((name, expected), content) in names.iter().zip(expected).zip(["1", "2", "3"]) {
            assert_eq!(name, &folder.path().join("traces").join(expected));
            assert_eq!(fs::read_to_string(name).unwrap(), content);
        }
    }
}
