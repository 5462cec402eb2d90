//! A file that grows by whole lines, and never ends the run that writes it.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use kiln_process::words::number_of;

use crate::files;

/// Appends lines to a file. A line that cannot be written, for example because the disk is full, leaves no
/// part of itself; how many there were is said when lines can be written again, or at the end.
pub struct Lines {
    path: PathBuf,
    file: File,
    /// Bytes of the lines that are whole.
    length: u64,
    lost: u64,
}

impl Lines {
    /// Appends to the file at `path`, which is created if it is not there.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = files::open_with(OpenOptions::new().create(true).append(true), path)?;
        let length = file.metadata()?.len();
        Ok(Lines { path: path.to_owned(), file, length, lost: 0 })
    }

    /// Appends a line, which is given without its end.
    pub fn append(&mut self, mut line: String) {
        line.push('\n');
        match self.file.write_all(line.as_bytes()) {
            Ok(()) => {
                self.length += line.len() as u64;
                self.tell();
            }
            Err(error) => {
                // If this fails as well, a line that is not whole stays; readers skip it.
                let _ = self.file.set_len(self.length);
                if self.lost == 0 {
                    let path = self.path.display();
                    tracing::warn!("cannot write {path}: {error}; the run goes on without its lines");
                }
                self.lost += 1;
            }
        }
    }

    fn tell(&mut self) {
        if self.lost > 0 {
            let lines = number_of(self.lost, "line");
            tracing::warn!("{lines} could not be written to {}", self.path.display());
            self.lost = 0;
        }
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        self.tell();
    }
}
