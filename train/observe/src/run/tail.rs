//! A file of lines that is read while it grows.

use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use kiln_sys::{LineReader, files};

#[derive(Clone, Debug)]
pub(super) struct Tail {
    path: PathBuf,
    /// Inode of the file last read, to detect that another file replaced it.
    inode: Option<u64>,
    read: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Change {
    None,
    Grown,
    /// The file was replaced or truncated, and was read again from its start.
    Replaced,
}

impl Tail {
    pub(super) fn new(path: PathBuf) -> Self {
        Tail { path, inode: None, read: 0 }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn has_been_read(&self) -> bool {
        self.inode.is_some()
    }

    /// Passes new lines to `line`, after a `None` if the file was replaced. Reads only complete lines.
    /// A missing file has no lines.
    pub(super) fn read(&mut self, mut line: impl FnMut(Option<&[u8]>)) -> io::Result<Change> {
        let mut file = match files::open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Change::None),
            Err(error) => return Err(error),
        };
        let (inode, length) = file.metadata().map(|file| (file.ino(), file.len()))?;
        let mut change = Change::None;
        if self.inode.is_some_and(|known| known != inode) || length < self.read {
            self.read = 0;
            line(None);
            change = Change::Replaced;
        }
        self.inode = Some(inode);
        file.seek(SeekFrom::Start(self.read))?;
        let mut lines = LineReader::new(file.take(length - self.read));
        while let Some(text) = lines.next_line()? {
            let Some(whole) = text.strip_suffix(b"\n") else { break };
            line(Some(whole));
            self.read += text.len() as u64;
            change = change.max(Change::Grown);
        }
        Ok(change)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn lines(tail: &mut Tail) -> (Change, Vec<String>) {
        let mut lines = Vec::new();
        let change =
            tail.read(|line| lines.extend(line.map(|line| String::from_utf8_lossy(line).into_owned())));
        (change.unwrap(), lines)
    }

    #[test]
    fn lines_arrive_once_and_complete() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lines");
        let mut tail = Tail::new(path.clone());
        assert_eq!(lines(&mut tail), (Change::None, vec![]));
        fs::write(&path, "one\ntwo\nthr").unwrap();
        assert_eq!(lines(&mut tail), (Change::Grown, vec!["one".into(), "two".into()]));
        assert_eq!(lines(&mut tail), (Change::None, vec![]));
        fs::write(&path, "one\ntwo\nthree\n").unwrap();
        assert_eq!(lines(&mut tail), (Change::Grown, vec!["three".into()]));
        fs::write(&path, "other\n").unwrap();
        assert_eq!(lines(&mut tail), (Change::Replaced, vec!["other".into()]));
        let other = folder.path().join("other");
        fs::write(&other, "a longer file\nthat replaces it\n").unwrap();
        fs::rename(&other, &path).unwrap();
        assert_eq!(lines(&mut tail).0, Change::Replaced);
        // Lines before an endless line in a sparse file remain read.
        let file = fs::File::options().write(true).open(&path).unwrap();
        file.set_len(1 << 38).unwrap();
        for _ in 0..2 {
            let mut count = 0;
            let error = tail.read(|line| count += usize::from(line.is_some())).unwrap_err();
            assert_eq!((error.kind(), count), (ErrorKind::FileTooLarge, 0));
        }
    }
}
