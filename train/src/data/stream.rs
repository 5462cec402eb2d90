//! Inputs that can be read only once: pipes, terminals, devices.

use std::fs::File;
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::io::Errno;

use super::DataError;

/// How long a stop may go unnoticed while nobody writes to a stream.
const STOP_INTERVAL: Duration = Duration::from_millis(100);

/// Copies the stream at `path` into `copy`, up to its end, and returns the number of bytes. Waits for a
/// FIFO that nobody has opened for writing yet.
///
/// # Errors
///
/// If the stream cannot be read, `copy` cannot be written, or `stop` becomes true.
pub(super) fn copy_to_end(
    path: &Path,
    copy: &mut File,
    stop: &AtomicBool,
) -> Result<u64, DataError> {
    // Without O_NONBLOCK, opening a FIFO and reading it would wait for a writer and hear of no stop.
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
                copy.write_all(&block[..read]).map_err(DataError::io("copy", path))?;
                bytes += read as u64;
            }
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(error) => return Err(DataError::io("read", path)(error)),
        }
    }
}

/// Waits until `stream` has bytes or has ended; the outer error is that `stop` became true.
fn wait_until_readable(stream: &File, stop: &AtomicBool) -> Result<io::Result<()>, DataError> {
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
