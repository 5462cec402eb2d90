//! Messages from a rank to its launcher about the reason of its end. A log may be on a full disk; this is a
//! pipe, which the launcher reads when the rank has ended.

use std::io::{self, PipeReader, Read};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::Command;

use kiln_sys::launcher::{PIPE, Word, parse};
use kiln_sys::page::{PAGE, Page, Seen};
use rustix::io::{FdFlags, fcntl_setfd, ioctl_fionbio};

/// Maximum bytes that are read: the capacity of a pipe.
const MOST: u64 = 64 * 1024;

/// The launcher's end of a rank's pipe, and the page on which the rank reports its position.
#[derive(Debug)]
pub(super) struct LastWords {
    pipe: PipeReader,
    page: Page,
}

impl LastWords {
    /// Creates the pipe and the page, and lets `command` start with the other end of each.
    pub(super) fn of(command: &mut Command) -> io::Result<LastWords> {
        let (reader, writer) = io::pipe()?;
        // Neither side ever waits for the other.
        ioctl_fionbio(&reader, true)?;
        ioctl_fionbio(&writer, true)?;
        let inode = nix::sys::stat::fstat(&writer)?.st_ino;
        command.env(PIPE, format!("{}:{inode}", writer.as_raw_fd()));
        let page = Page::new()?;
        let (name, file) = page.for_child()?;
        command.env(PAGE, name);
        let inherit = move || {
            fcntl_setfd(&file, FdFlags::empty())?;
            Ok(fcntl_setfd(&writer, FdFlags::empty())?)
        };
        // SAFETY: between fork and exec this makes a few system calls, and neither locks nor allocates.
        unsafe { command.pre_exec(inherit) };
        Ok(LastWords { pipe: reader, page })
    }

    /// Returns the current or last position of the rank.
    pub(super) fn seen(&self) -> Seen {
        self.page.seen()
    }

    /// Returns the messages of a rank that has ended.
    pub(super) fn read(&self) -> Vec<(Word, String)> {
        let mut bytes = Vec::new();
        // If another process still holds the pipe open, reading ends with an error after all of its contents.
        let _ = (&self.pipe).take(MOST).read_to_end(&mut bytes);
        parse(&bytes)
    }
}
