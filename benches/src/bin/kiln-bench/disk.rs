//! Plain sequential writing and reading on the same disk, the baseline for checkpoints.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::path::Path;

use kiln::checkpoint::CheckpointError;
use kiln::run::TrainError;
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

const BLOCK: usize = 4 << 20;

/// Writes one new file sequentially, and waits until it is on disk.
pub fn write(path: &Path, bytes: u64) -> io::Result<()> {
    let mut file = File::create(path)?;
    in_blocks(bytes, BLOCK, |block| file.write_all(block))?;
    file.sync_all()
}

/// Passes `bytes` bytes to `write`, at most `size` at a time.
pub fn in_blocks(bytes: u64, size: usize, mut write: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
    // Not all zeros, which some disks do not actually write.
    let block: Vec<u8> = (0..size).map(|i| (i % 251) as u8).collect();
    let mut left = bytes;
    while left > 0 {
        let now = left.min(size as u64);
        write(&block[..now as usize])?;
        left -= now;
    }
    Ok(())
}

pub fn read(path: &Path) -> io::Result<()> {
    let mut file = File::open(path)?;
    let mut block = vec![0; BLOCK];
    while file.read(&mut block)? > 0 {}
    Ok(())
}

/// Drops `path`, a file or a folder of files, from the system's cache, so that the next read comes from the disk.
pub fn forget(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return fs::read_dir(path)?.try_for_each(|entry| forget(&entry?.path()));
    }
    let file = File::open(path)?;
    file.sync_all()?;
    Ok(posix_fadvise(file.as_fd(), 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)?)
}

pub fn error(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> TrainError {
    move |source| CheckpointError::Io { operation, path: path.to_owned(), source }.into()
}
