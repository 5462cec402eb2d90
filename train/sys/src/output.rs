//! Lines for people, on standard output and standard error. A line that cannot be written, for example
//! because a log is on a full disk, causes no failure: it is counted, and the count is written as soon as
//! there is room again, or at the end of the process.
//!
//! A run must not wait for a reader that has stopped reading, such as `less` or a terminal under Ctrl-S: see
//! [`never_block`]. Commands whose purpose is their output do wait.

mod bar;
mod lines;
mod one_line;
mod progress_line;
mod silence;
mod stream;
mod streams;

use std::backtrace::{Backtrace, BacktraceStatus};
use std::io::{self, Write};
use std::panic;
use std::thread;
use std::time::Duration;

use super::launcher::{self, Word};
use lines::put;
use streams::{STDERR, STDOUT};

pub use bar::{Bar, columns, gauge};
pub use lines::{complain, printable, say};
pub use one_line::one_line;
pub use progress_line::ProgressLine;
pub use silence::{Silence, silence};

/// Maximum time to wait, at the end, for a stream that accepts nothing.
const PATIENCE: Duration = Duration::from_secs(2);

/// While a value of this type lives, writing to standard output and standard error does not wait for any
/// reader.
#[derive(Debug)]
#[must_use]
pub struct NeverBlocks(());

/// Makes separate threads write the lines. Lines for which a reader leaves no room are counted and dropped.
/// Dropping the returned value waits until everything is written or the reader has stopped.
pub fn never_block() -> NeverBlocks {
    STDOUT.hold();
    STDERR.hold();
    NeverBlocks(())
}

impl Drop for NeverBlocks {
    fn drop(&mut self) {
        for stream in [&STDOUT, &STDERR] {
            stream.drain(PATIENCE);
            stream.release();
        }
    }
}

/// Waits until everything is written, or nothing more can be. Reports lines that could not be written,
/// wherever that is possible: on the stream itself, on the other one, or to the launcher. Call it at the end
/// of a process. Returns true if standard output has accepted every line of this process.
pub fn finish() -> bool {
    let lost = [&STDERR, &STDOUT].map(|stream| stream.finish(PATIENCE));
    for (text, other) in lost.into_iter().zip([&STDOUT, &STDERR]) {
        let Some(text) = text else { continue };
        launcher::tell(Word::Note, &text);
        // If that is full as well, nothing more can be done.
        other.put(format!("kiln: {text}\n").as_bytes());
        other.drain(PATIENCE);
    }
    !STDOUT.has_lost()
}

/// Makes panics be reported in the words of Rust's own hook, but written like any other line: a rank that
/// panics must not wait for a reader either.
pub fn tell_panics() {
    panic::set_hook(Box::new(|panic| {
        let thread = thread::current();
        let name = thread.name().unwrap_or("<unnamed>");
        let trace = Backtrace::capture();
        let more = match trace.status() {
            BacktraceStatus::Captured => format!("stack backtrace:\n{trace}"),
            _ => "note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace".to_owned(),
        };
        complain(&format!("\nthread '{name}' {panic}\n{more}"));
    }));
}

/// Returns true if lines for standard error wait to be written. May be called in a signal handler.
pub(super) fn complaints_wait() -> bool {
    STDERR.waiting() > 0
}

/// Standard output or standard error as a writer that never fails, for log events and long texts.
#[derive(Clone, Copy, Debug)]
pub enum Console {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

impl Write for Console {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Console::Stdout => put(&STDOUT, &STDERR, bytes),
            Console::Stderr => put(&STDERR, &STDOUT, bytes),
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
