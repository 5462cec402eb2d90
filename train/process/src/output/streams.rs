//! The two outputs of the process.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::time::Duration;

use super::stream::Stream;

/// How long a line waits for earlier lines on the other stream: both may go to the same terminal.
pub(super) const ORDER: Duration = Duration::from_millis(100);

pub(super) static STDOUT: Stream = Stream::new("standard output", |bytes| {
    let mut console = io::stdout();
    // What somebody else has printed comes first.
    let _ = console.flush();
    // Not locked: whoever panics or prints must not wait for a write that does not end.
    rustix::io::write(console.as_fd(), bytes)
});

pub(super) static STDERR: Stream =
    Stream::new("standard error", |bytes| rustix::io::write(io::stderr().as_fd(), bytes));
