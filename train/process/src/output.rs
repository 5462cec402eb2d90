//! Lines for people, on standard output and standard error. A line that cannot be written, for example
//! because a log is on a full disk, ends nothing: it is counted, and the count is written as soon as
//! there is room again, or at the end of the process.
//!
//! A run must not wait for a reader that has stopped reading, such as `less` or a terminal under Ctrl-S:
//! see [`never_block`]. Commands whose output is their purpose do wait.

mod bar;
mod one_line;
mod stream;

use std::backtrace::{Backtrace, BacktraceStatus};
use std::borrow::Cow;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::panic;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use super::launcher::{self, Word};
use stream::Stream;

pub use bar::{columns, watched_bar};
pub use one_line::one_line;

static STDOUT: Stream = Stream::new("standard output", |bytes| {
    let mut console = io::stdout();
    // What somebody else has printed comes first.
    let _ = console.flush();
    // Not locked: whoever panics or prints must not wait for a write that does not end.
    rustix::io::write(console.as_fd(), bytes)
});

static STDERR: Stream = Stream::new("standard error", |bytes| rustix::io::write(io::stderr().as_fd(), bytes));

/// How long a stream that takes nothing is waited for at the end.
const PATIENCE: Duration = Duration::from_secs(2);

/// How long a line waits for earlier lines on the other stream: both may go to the same terminal.
const ORDER: Duration = Duration::from_millis(100);

/// How many want silence.
static SILENT: AtomicUsize = AtomicUsize::new(0);

/// While a value of this type lives, [`say`] says nothing, and there is no bar: for runs that are part of a
/// command with something else to say. Errors and warnings are told.
#[derive(Debug)]
#[must_use]
pub struct Silence(());

/// Nothing is said from now on.
pub fn silence() -> Silence {
    SILENT.fetch_add(1, Ordering::Relaxed);
    Silence(())
}

impl Drop for Silence {
    fn drop(&mut self) {
        SILENT.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Whether anyone wants silence.
fn is_silent() -> bool {
    SILENT.load(Ordering::Relaxed) > 0
}

/// Writes a line to standard output, [`printable`]. A line that cannot be written is counted.
pub fn say(text: &str) {
    if is_silent() {
        return;
    }
    put(&STDOUT, &STDERR, format!("{}\n", printable(text)).as_bytes());
}

/// Writes a line to standard error, [`printable`]. A line that cannot be written is counted.
pub fn complain(text: &str) {
    put(&STDERR, &STDOUT, format!("{}\n", printable(text)).as_bytes());
}

/// `text` without what a terminal would obey: names come from files of others. Control characters other than
/// the end of a line and the tab are spelled out as in JSON, `\u001b`, which stays JSON that way.
pub fn printable(text: &str) -> Cow<'_, str> {
    let is_obeyed = |c: char| c.is_control() && c != '\n' && c != '\t';
    if !text.contains(is_obeyed) {
        return text.into();
    }
    let mut shown = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        if is_obeyed(c) { shown.push_str(&format!("\\u{:04x}", u32::from(c))) } else { shown.push(c) }
    }
    shown.into()
}

/// Writes behind what waits for the other stream.
fn put(stream: &Stream, other: &Stream, bytes: &[u8]) {
    other.let_go_first(ORDER);
    stream.put(bytes);
}

/// While a value of this type lives, writing to standard output and standard error waits for no reader.
#[derive(Debug)]
#[must_use]
pub struct NeverBlocks(());

/// From now on, threads of their own write the lines. Lines for which a reader leaves no room are counted
/// and left out. Dropping the value waits until everything is written or the reader has stopped.
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

/// Waits until everything is written, or nothing more can be. Says what could not be written until now,
/// where that can be written: on the stream itself, on the other one, or to the launcher. To be called at
/// the end of a process. Returns whether standard output has taken every line of this process.
pub fn finish() -> bool {
    let lost = [&STDERR, &STDOUT].map(|stream| stream.finish(PATIENCE));
    for (text, other) in lost.into_iter().zip([&STDOUT, &STDERR]) {
        let Some(text) = text else { continue };
        launcher::tell(Word::Note, &text);
        // Nothing more can be done if that is full as well.
        other.put(format!("kiln: {text}\n").as_bytes());
        other.drain(PATIENCE);
    }
    !STDOUT.has_lost()
}

/// From now on, panics are told in the words of Rust's own hook, but as any other line is: a rank that
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

/// Whether lines for standard error wait to be written. May be called in a signal handler.
pub(super) fn complaints_wait() -> bool {
    STDERR.waiting() > 0
}

/// Standard output or standard error as a writer that never fails, for log events and texts of many lines.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminals_are_not_told_what_to_do() {
        let plain = "a \u{e4}\u{4e2d}\n\tb \u{1f642}";
        assert!(matches!(printable(plain), Cow::Borrowed(text) if text == plain));
        let evil = "\u{1b}[2J\r\u{9b}31m\u{7}\u{7f}";
        assert_eq!(printable(evil), r"\u001b[2J\u000d\u009b31m\u0007\u007f");
    }
}
