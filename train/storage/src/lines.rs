//! Files that grow by whole lines or records, and never end the run that writes them.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use kiln_process::words::number_of;

use crate::files;

/// Appends records to a file. A record that cannot be written, for example because the disk is full, leaves no
/// part of itself; how many there were is said when records can be written again, or at the end.
pub struct Records {
    path: PathBuf,
    file: File,
    /// Bytes of the records that are whole.
    length: u64,
    /// Whether part of a record could not be cut off again.
    is_torn: bool,
    lost: u64,
    /// Why the first record that is lost could not be written.
    failure: Option<io::Error>,
    /// What one of them is called.
    noun: &'static str,
}

impl Records {
    /// Appends to the file at `path`, which is created if it is not there. `noun` is what a record is called in
    /// what is said about it.
    pub fn open(path: &Path, noun: &'static str) -> io::Result<Self> {
        let file = files::open_with(OpenOptions::new().create(true).append(true), path)?;
        let length = file.metadata()?.len();
        Ok(Records { path: path.to_owned(), file, length, is_torn: false, lost: 0, failure: None, noun })
    }

    /// Appends a record. Returns whether it is there.
    pub fn append(&mut self, record: &[u8]) -> bool {
        let written = self.mend().and_then(|()| self.file.write_all(record));
        let is_there = written.is_ok();
        match written {
            Ok(()) => {
                self.length += record.len() as u64;
                self.tell();
            }
            Err(error) => {
                // If this fails as well, it is tried again before the next record.
                self.is_torn = true;
                let _ = self.mend();
                if self.lost == 0 {
                    let (path, noun) = (self.path.display(), self.noun);
                    tracing::warn!("cannot write {path}: {error}; the run goes on without its {noun}s");
                }
                self.lost += 1;
                self.failure.get_or_insert(error);
            }
        }
        is_there
    }

    /// Ends the file, for whoever needs all of it.
    ///
    /// # Errors
    ///
    /// If any record is lost, the error of the first one; or if the disk does not take what was written.
    pub fn finish(mut self) -> io::Result<()> {
        match self.failure.take() {
            Some(error) => Err(error),
            None => self.file.sync_all(),
        }
    }

    /// Cuts off what is there of a record that is not whole.
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
    /// Whether the last line that was there has no end: a process or a machine has gone down in the middle of it.
    is_open: bool,
}

impl Lines {
    /// Appends to the file at `path`, which is created if it is not there.
    pub fn open(path: &Path) -> io::Result<Self> {
        let records = Records::open(path, "line")?;
        let mut last = *b"\n";
        if let Some(at) = records.length.checked_sub(1) {
            files::open(path)?.read_exact_at(&mut last, at)?;
        }
        Ok(Lines { records, is_open: last != *b"\n" })
    }

    /// Appends a line, which is given without its end.
    pub fn append(&mut self, mut line: String) {
        line.push('\n');
        if self.is_open {
            line.insert(0, '\n');
        }
        self.is_open &= !self.records.append(line.as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

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
