//! The two outputs of the process.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::time::Duration;

use super::stream::Stream;

/// Maximum time that a line waits for earlier lines on the other stream: both may go to the same terminal.
pub(super) const ORDER: Duration = Duration::from_millis(100);

pub(super) static STDOUT: Stream = Stream::new("standard output", |bytes| {
    let mut console = io::stdout();
    // Output printed by other code comes first.
    let _ = console.flush();
    // Not locked: threads that panic or print must not wait for a write that does not end.
    rustix::io::write(console.as_fd(), bytes)
});

pub(super) static STDERR: Stream =
    Stream::new("standard error", |bytes| rustix::io::write(io::stderr().as_fd(), bytes));
