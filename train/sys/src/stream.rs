//! Writes large files once, bypassing the system's cache. Checkpoints are not read again soon, and direct writes use no
//! cache memory and almost no processor time.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use memmap2::{Advice, MmapMut};
use nix::fcntl::{FcntlArg, OFlag, fcntl};

/// Direct writes need addresses and lengths that are multiples of this number.
const PAGE: usize = 4096;

const BUFFER: usize = 4 << 20;

/// Number of bytes copied at a time, few enough to stay in a core's cache.
const CHUNK: usize = 1 << 15;

/// A file that is being written.
pub struct Stream {
    file: File,
    buffer: MmapMut,
    filled: usize,
    written: u64,
    direct: bool,
}

impl Stream {
    /// Creates `path`, or empties the existing file.
    pub fn create(path: &Path) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true);
        let direct = options.clone().custom_flags(OFlag::O_DIRECT.bits()).open(path);
        let (file, direct) = match direct {
            // Some file systems do not support direct writes.
            Err(error) if error.kind() == ErrorKind::InvalidInput => (options.open(path)?, false),
            other => (other?, true),
        };
        // A mapping is page-aligned, and large pages make writes cheaper.
        let buffer = MmapMut::map_anon(BUFFER)?;
        let _ = buffer.advise(Advice::HugePage);
        Ok(Stream { file, buffer, filled: 0, written: 0, direct })
    }

    /// Appends `bytes` in chunks, and calls `each` with every chunk right after copying it, while it is cached.
    pub fn append(&mut self, bytes: &[u8], mut each: impl FnMut(&[u8])) -> io::Result<()> {
        let mut left = bytes;
        while !left.is_empty() {
            let room = left.len().min(BUFFER - self.filled).min(CHUNK);
            let (now, later) = left.split_at(room);
            let place = &mut self.buffer[self.filled..self.filled + room];
            place.copy_from_slice(now);
            each(place);
            self.filled += room;
            left = later;
            if self.filled == BUFFER {
                self.write_out(self.filled)?;
            }
        }
        Ok(())
    }

    /// Number of appended bytes.
    pub fn length(&self) -> u64 {
        self.written + self.filled as u64
    }

    fn write_out(&mut self, length: usize) -> io::Result<()> {
        let Stream { file, buffer, direct, .. } = self;
        let file = &*file;
        let write = |bytes: &[u8]| Write::write(&mut &*file, bytes);
        let buffered = || Ok(fcntl(file, FcntlArg::F_SETFL(OFlag::empty())).map(drop)?);
        write_all(&buffer[..length], direct, write, buffered)?;
        self.written += self.filled as u64;
        self.filled = 0;
        Ok(())
    }

    /// Writes the remaining bytes and syncs the file.
    pub fn finish(mut self) -> io::Result<()> {
        let length = self.length();
        if self.filled > 0 {
            // Direct writes need whole pages; the excess is truncated below.
            let padded = self.filled.next_multiple_of(PAGE);
            self.buffer[self.filled..padded].fill(0);
            self.write_out(padded)?;
            self.file.set_len(length)?;
        }
        self.file.sync_all()
    }
}

/// If the file system refuses a direct write, turns direct writing off with `buffered` and writes the rest.
fn write_all(
    mut bytes: &[u8],
    direct: &mut bool,
    mut write: impl FnMut(&[u8]) -> io::Result<usize>,
    buffered: impl Fn() -> io::Result<()>,
) -> io::Result<()> {
    while !bytes.is_empty() {
        match write(bytes) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(count) => bytes = &bytes[count..],
            // Some file systems accept O_DIRECT at opening and refuse it at writing.
            Err(error) if *direct && error.kind() == ErrorKind::InvalidInput => {
                buffered()?;
                *direct = false;
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn what_is_appended_is_in_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let bytes: Vec<u8> = (0..BUFFER * 2 + 5000).map(|i| (i % 251) as u8).collect();
        for cut in [0, 1, PAGE, BUFFER - 1, BUFFER, bytes.len()] {
            let mut stream = Stream::create(&path).unwrap();
            let mut seen = Vec::new();
            for part in [&bytes[..cut], &bytes[cut..]] {
                stream.append(part, |chunk| seen.extend_from_slice(chunk)).unwrap();
            }
            assert_eq!(stream.length(), bytes.len() as u64);
            stream.finish().unwrap();
            assert!(seen == bytes && std::fs::read(&path).unwrap() == bytes, "cut at {cut}");
        }
        Stream::create(&path).unwrap().finish().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"");
    }
    /// Simulates a file system that accepts a direct write only up to the middle of a page.
    #[test]
    fn a_direct_write_that_was_cut_short_goes_on_where_it_was() {
        for cut in [0, 100] {
            let bytes: Vec<u8> = (0..3 * PAGE).map(|i| (i % 251) as u8).collect();
            let (mut direct, is_buffered) = (true, Cell::new(false));
            let mut written = Vec::new();
            let write = |rest: &[u8]| {
                if !is_buffered.get() && written.len() == cut {
                    return Err(ErrorKind::InvalidInput.into());
                }
                let count = if is_buffered.get() { rest.len() } else { cut };
                written.extend_from_slice(&rest[..count]);
                Ok(count)
            };
            let buffered = || {
                is_buffered.set(true);
                Ok(())
            };
            write_all(&bytes, &mut direct, write, buffered).unwrap();
            assert!(written == bytes && !direct, "cut at {cut}");
        }
        let refused = |_: &[u8]| Err(ErrorKind::InvalidInput.into());
        assert!(write_all(b"x", &mut false, refused, || Ok(())).is_err());
        assert!(write_all(b"x", &mut true, |_| Ok(0), || Ok(())).is_err());
    }
}
