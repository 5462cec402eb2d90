//! Inputs that can be read only once: pipes, terminals, devices.

use std::fmt;
use std::fs::{self, File, Metadata};
use std::io::{self, ErrorKind, Read as _, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kiln_sys::files;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::io::Errno;

use super::{DataError, Result};

/// Longest time between two checks of `stop` while no process writes to the stream.
const STOP_INTERVAL: Duration = Duration::from_millis(100);

/// A kind of input that can be read only once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// A pipe, named or unnamed.
    Pipe,
    /// A terminal, or another device.
    Device,
    /// A socket, which cannot be opened.
    Socket,
}

impl Stream {
    /// Returns the stream kind; `None` for regular files and folders.
    pub(super) fn from_metadata(metadata: &Metadata) -> Option<Self> {
        let kind = metadata.file_type();
        match () {
            () if kind.is_file() || kind.is_dir() => None,
            () if kind.is_fifo() => Some(Self::Pipe),
            () if kind.is_socket() => Some(Self::Socket),
            () => Some(Self::Device),
        }
    }

    pub(super) fn from_path(path: &Path) -> Option<Self> {
        Self::from_metadata(&fs::metadata(path).ok()?)
    }
}

impl fmt::Display for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pipe => "a pipe",
            Self::Device => "a device",
            Self::Socket => "a socket",
        })
    }
}

/// Copies the stream at `path` into `copy` and returns its size in bytes. Waits for a writer of a FIFO. Fails if the
/// stream is longer than `most` bytes, or `stop` becomes true.
pub(super) fn copy_to_end(path: &Path, copy: &mut impl Write, most: u64, stop: &AtomicBool) -> Result<u64> {
    // Without O_NONBLOCK, opening a FIFO and reading it would wait for a writer and could not be stopped.
    let nonblocking = OFlags::NONBLOCK.bits().cast_signed();
    let mut stream = File::options()
        .read(true)
        .custom_flags(nonblocking)
        .open(path)
        .map_err(DataError::io("open", path))?;
    let mut block = vec![0; 1 << 16];
    let mut bytes = 0;
    loop {
        wait_until_readable(&stream, stop)?.map_err(DataError::io("read", path))?;
        match stream.read(&mut block) {
            Ok(0) => return Ok(bytes),
            Ok(read) => {
                bytes += read as u64;
                if bytes > most {
                    return Err(DataError::io("read", path)(files::too_long(most)));
                }
                copy.write_all(&block[..read]).map_err(DataError::io("copy", path))?;
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(error) => return Err(DataError::io("read", path)(error)),
        }
    }
}

/// Waits until `stream` has bytes or has ended. The outer error means that `stop` became true.
fn wait_until_readable(stream: &File, stop: &AtomicBool) -> Result<io::Result<()>> {
    let interval = Timespec { tv_sec: 0, tv_nsec: i64::from(STOP_INTERVAL.subsec_nanos()) };
    loop {
        if stop.load(Ordering::Relaxed) {
            return Err(DataError::Stopped);
        }
        let mut asked = [PollFd::from_borrowed_fd(stream.as_fd(), PollFlags::IN)];
        match poll(&mut asked, Some(&interval)) {
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(Ok(())),
            Err(error) => return Ok(Err(error.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endless_streams_are_limited() {
        let mut copy = Vec::new();
        let stop = AtomicBool::new(false);
        let endless = copy_to_end(Path::new("/dev/zero"), &mut copy, 1 << 20, &stop).unwrap_err();
        assert!(endless.to_string().contains("/dev/zero: it is longer than the 1048576 bytes"));
        assert_eq!(copy.len(), 1 << 20);
        assert_eq!(copy_to_end(Path::new("/dev/null"), &mut copy, 0, &stop).unwrap(), 0);
    }
}
