//! Files that grow by whole lines or records. A failed write does not fail the run, and reading takes limited memory.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::words::number_of;

use crate::durable::parent_of;
use crate::files;

type Identity = (u64, u64);

fn identity_of(found: &Metadata) -> Identity {
    (found.dev(), found.ino())
}

fn open_to_append(path: &Path) -> io::Result<(File, Identity, u64)> {
    let file = files::open_with(OpenOptions::new().create(true).append(true), path)?;
    let found = file.metadata()?;
    Ok((file, identity_of(&found), found.len()))
}

/// Appends records to a file. A failed write leaves no partial record, and the number of lost records is reported
/// later. If the file is removed or replaced, the next record goes to the new file at this path, with a warning.
pub struct Records {
    path: PathBuf,
    file: File,
    /// Identity of the file, and of its folder: if the folder was moved, the file moved with it, and writing continues.
    identity: Identity,
    folder: Option<Identity>,
    length: u64,
    is_torn: bool,
    lost: u64,
    /// The error of the first lost record.
    failure: Option<io::Error>,
    noun: &'static str,
}

impl Records {
    /// Opens the file at `path` for appending, creating it if necessary. `noun` names a record in messages.
    pub fn open(path: &Path, noun: &'static str) -> io::Result<Self> {
        let (file, identity, length) = open_to_append(path)?;
        let folder = fs::metadata(parent_of(path)).ok().map(|folder| identity_of(&folder));
        let path = path.to_owned();
        Ok(Records { path, file, identity, folder, length, is_torn: false, lost: 0, failure: None, noun })
    }

    /// Switches to the file that is now at the path, if it is a different file. Returns whether it switched.
    fn follow(&mut self) -> bool {
        let identity = |path: &Path| fs::metadata(path).ok().map(|found| identity_of(&found));
        if identity(&self.path) == Some(self.identity) || identity(parent_of(&self.path)) != self.folder {
            return false;
        }
        let Ok((file, identity, length)) = open_to_append(&self.path) else { return false };
        let (path, noun) = (self.path.display(), self.noun);
        tracing::warn!(
            "{path} was removed or replaced while the run wrote to it; its next {noun}s go to the new file at this path"
        );
        (self.file, self.identity, self.length, self.is_torn) = (file, identity, length, false);
        true
    }

    /// Appends a record. Returns whether it was written.
    pub fn append(&mut self, record: &[u8]) -> bool {
        self.follow();
        let written = self.mend().and_then(|()| self.file.write_all(record));
        let is_there = written.is_ok();
        match written {
            Ok(()) => {
                self.length += record.len() as u64;
                self.tell();
            }
            Err(error) => {
                // A failure here is retried before the next record.
                self.is_torn = true;
                let _ = self.mend();
                if self.lost == 0 {
                    let (path, noun) = (self.path.display(), self.noun);
                    tracing::warn!("cannot write {path}: {error}; the run continues without its {noun}s");
                }
                self.lost += 1;
                self.failure.get_or_insert(error);
            }
        }
        is_there
    }

    /// Closes the file, for callers that need every record.
    ///
    /// # Errors
    ///
    /// The error of the first lost record, or an error if the disk does not accept the data.
    pub fn finish(mut self) -> io::Result<()> {
        match self.failure.take() {
            Some(error) => Err(error),
            None => self.file.sync_all(),
        }
    }

    fn mend(&mut self) -> io::Result<()> {
        if self.is_torn {
            self.file.set_len(self.length)?;
            self.is_torn = false;
        }
        Ok(())
    }

    fn tell(&mut self) {
        if self.lost > 0 {
            let lost = number_of(self.lost, self.noun);
            tracing::warn!("{lost} could not be written to {}", self.path.display());
            self.lost = 0;
        }
    }
}

impl Drop for Records {
    fn drop(&mut self) {
        self.tell();
    }
}

/// Appends lines to a file, as [`Records`] does.
pub struct Lines {
    records: Records,
    /// True if the file's last line has no line end, after a crash during a write.
    is_open: bool,
}

impl Lines {
    /// Opens the file at `path` for appending, creating it if necessary.
    pub fn open(path: &Path) -> io::Result<Self> {
        let mut lines = Lines { records: Records::open(path, "line")?, is_open: false };
        lines.is_open = lines.has_open_line()?;
        Ok(lines)
    }

    fn has_open_line(&self) -> io::Result<bool> {
        let mut last = *b"\n";
        if let Some(at) = self.records.length.checked_sub(1) {
            files::open(&self.records.path)?.read_exact_at(&mut last, at)?;
        }
        Ok(last != *b"\n")
    }

    /// Appends a line, given without its line end.
    pub fn append(&mut self, mut line: String) {
        line.push('\n');
        if self.records.follow() {
            self.is_open = self.has_open_line().unwrap_or(true);
        }
        if self.is_open {
            line.insert(0, '\n');
        }
        self.is_open &= !self.records.append(line.as_bytes());
    }
}

/// Maximum length of a line in bytes.
pub const MAX_LINE: usize = 64 << 20;

/// Reads the lines of a file, one at a time.
pub struct LineReader<R> {
    reader: BufReader<R>,
    line: Vec<u8>,
}

impl LineReader<File> {
    /// Reads the regular file at `path`.
    pub fn open(path: &Path) -> io::Result<Self> {
        Ok(LineReader::new(files::open(path)?))
    }
}

impl<R: Read> LineReader<R> {
    /// Reads the lines of `source`.
    pub fn new(source: R) -> Self {
        LineReader { reader: BufReader::with_capacity(1 << 16, source), line: Vec::new() }
    }

    /// Returns the next line with its line end, which the last line may lack. Returns `None` after the last line.
    ///
    /// # Errors
    ///
    /// [`FileTooLarge`](io::ErrorKind::FileTooLarge) for more than [`MAX_LINE`] bytes, or errors of the file system.
    pub fn next_line(&mut self) -> io::Result<Option<&[u8]>> {
        self.line.clear();
        let read = self.reader.by_ref().take(MAX_LINE as u64 + 1).read_until(b'\n', &mut self.line)?;
        match read {
            0 => Ok(None),
            1..=MAX_LINE => Ok(Some(&self.line)),
            _ => {
                let problem = format!("a line in it has more than {MAX_LINE} bytes");
                Err(io::Error::new(io::ErrorKind::FileTooLarge, problem))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn lines_are_read_one_by_one_and_none_without_a_bound() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lines");
        fs::write(&path, "one\n\nthree").unwrap();
        let mut lines = LineReader::open(&path).unwrap();
        for line in ["one\n", "\n", "three"] {
            assert_eq!(lines.next_line().unwrap(), Some(line.as_bytes()));
        }
        assert_eq!(lines.next_line().unwrap(), None);
        // A complete line, then a sparse file larger than memory.
        File::options().write(true).open(&path).unwrap().set_len(1 << 38).unwrap();
        let mut lines = LineReader::open(&path).unwrap();
        assert_eq!(lines.next_line().unwrap(), Some(&b"one\n"[..]));
        assert_eq!(lines.next_line().unwrap(), Some(&b"\n"[..]));
        assert_eq!(lines.next_line().unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        assert!(lines.line.capacity() < 3 * MAX_LINE);
    }

    #[test]
    fn a_file_that_is_replaced_or_removed_loses_no_later_line() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("run");
        fs::create_dir(&run).unwrap();
        let (path, aside) = (run.join("lines"), run.join("aside"));
        let mut lines = Lines::open(&path).unwrap();
        let mut append = |line: &str| lines.append(line.to_owned());
        append("one");
        fs::write(&aside, "edi").unwrap();
        fs::rename(&aside, &path).unwrap();
        append("two");
        assert_eq!(fs::read_to_string(&path).unwrap(), "edi\ntwo\n");
        fs::remove_file(&path).unwrap();
        append("three");
        assert_eq!(fs::read_to_string(&path).unwrap(), "three\n");
        // In a moved folder, the file is still the right one. No line goes to another run.
        let moved = folder.path().join("moved");
        fs::rename(&run, &moved).unwrap();
        append("four");
        fs::create_dir(&run).unwrap();
        fs::write(&path, "another run\n").unwrap();
        append("five");
        assert_eq!(fs::read_to_string(moved.join("lines")).unwrap(), "three\nfour\nfive\n");
        assert_eq!(fs::read_to_string(&path).unwrap(), "another run\n");
    }

    #[test]
    fn a_line_without_an_end_does_not_swallow_the_next_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lines");
        fs::write(&path, "one\ntw").unwrap();
        let mut lines = Lines::open(&path).unwrap();
        ["three", "four"].into_iter().for_each(|line| lines.append(line.to_owned()));
        drop(lines);
        Lines::open(&path).unwrap().append("five".to_owned());
        assert_eq!(fs::read_to_string(&path).unwrap(), "one\ntw\nthree\nfour\nfive\n");
    }
}
