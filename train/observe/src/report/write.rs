//! The folder of a report.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::Path;

use kiln_storage::StagingFolder;
use kiln_storage::durable::{parent_of, sync_folder, write as write_file};

use super::document::Document;
use super::error::ReportError;
use super::{html, markdown};
use crate::plot::Ink;

/// Fails unless a report can come to `place`: nothing is there, or an empty folder. `flag` has named the place.
pub fn check_place(place: &Path, flag: &'static str) -> Result<(), ReportError> {
    let exists = || ReportError::Exists { path: place.to_owned(), flag };
    match fs::read_dir(place) {
        Ok(mut entries) => entries.next().map_or(Ok(()), |_| Err(exists())),
        Err(error) if error.kind() == ErrorKind::NotFound && !place.is_symlink() => Ok(()),
        Err(error) if error.kind() == ErrorKind::NotADirectory => Err(exists()),
        Err(source) => Err(ReportError::Io { path: place.to_owned(), source }),
    }
}

/// Writes `document` into the folder `place`, which is new or empty: `report.html`, `report.md`, and a file for
/// each plot. The folder appears whole or not at all.
///
/// # Errors
///
/// If there is something already, or the file system refuses.
pub fn write(document: &Document, place: &Path, flag: &'static str) -> Result<(), ReportError> {
    check_place(place, flag)?;
    let io = |source: io::Error| match source.kind() {
        // Since it was looked for.
        ErrorKind::DirectoryNotEmpty | ErrorKind::AlreadyExists | ErrorKind::NotADirectory => {
            ReportError::Exists { path: place.to_owned(), flag }
        }
        _ => ReportError::Io { path: place.to_owned(), source },
    };
    fs::create_dir_all(parent_of(place)).map_err(io)?;
    let beside = StagingFolder::create(place).map_err(io)?;
    fill(document, beside.path()).map_err(io)?;
    // An empty folder is replaced, and no other.
    fs::rename(beside.path(), place).map_err(io)?;
    beside.gone();
    sync_folder(parent_of(place)).map_err(io)
}

fn fill(document: &Document, folder: &Path) -> io::Result<()> {
    write_file(&folder.join("report.html"), html::page(document).as_bytes())?;
    write_file(&folder.join("report.md"), markdown::page(document).as_bytes())?;
    for figure in document.figures() {
        let drawn = figure.plot.wide(Ink::File).file(figure.id);
        write_file(&folder.join(markdown::file_of(figure)), drawn.as_bytes())?;
    }
    sync_folder(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_overwritten() {
        let root = tempfile::tempdir().unwrap();
        let document = Document { title: "A report".to_owned(), blocks: Vec::new() };
        let place = root.path().join("a/report");
        write(&document, &place, "--out").unwrap();
        let names = |folder: &Path| {
            let mut names: Vec<_> =
                fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            names.sort();
            names
        };
        assert_eq!(names(&place), ["report.html", "report.md"]);
        let again = write(&document, &place, "--out").unwrap_err().to_string();
        assert!(again.ends_with("name a new folder with --out DIR, or remove that one"), "{again}");
        let (empty, file) = (root.path().join("empty"), root.path().join("file"));
        fs::create_dir(&empty).unwrap();
        fs::write(&file, "mine").unwrap();
        write(&document, &empty, "--out").unwrap();
        assert!(matches!(write(&document, &file, "--out"), Err(ReportError::Exists { .. })));
        assert_eq!(fs::read(&file).unwrap(), b"mine");
        assert_eq!(names(root.path()), ["a", "empty", "file"]);
    }
}
