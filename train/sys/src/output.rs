//! Writes lines for people to standard output and standard error. A line that cannot be written, for example
//! because a log is on a full disk, is not an error: it is counted, and the count is written as soon as that
//! is possible, or at the end of the process.
//!
//! A run must not wait for a reader that has stopped reading, such as `less` or a terminal under Ctrl-S: see
//! [`never_block`]. Commands whose purpose is their output do wait.

mod bar;
mod progress;
mod stream;

use std::backtrace::{Backtrace, BacktraceStatus};
use std::borrow::Cow;
use std::io::{self, Write};
use std::panic;
use std::thread;
use std::time::Duration;

use unicode_width::UnicodeWidthChar;

use super::launcher::{self, Message};
use stream::{ORDER, STDERR, STDOUT, Stream, is_silent};

pub use bar::{Bar, columns};
pub use progress::{Meter, ProgressLine, gauge};
pub use stream::{Silence, silence};

/// How long the end of the process waits for a stream that accepts nothing.
const PATIENCE: Duration = Duration::from_secs(2);

/// Writes a line to standard output, made [`printable`]. A line that cannot be written is counted.
pub fn print_line(text: &str) {
    if !is_silent() {
        put(&STDOUT, &STDERR, format!("{}\n", printable(text)).as_bytes());
    }
}

/// Writes a line to standard error, made [`printable`]. A line that cannot be written is counted.
pub fn eprint_line(text: &str) {
    put(&STDERR, &STDOUT, format!("{}\n", printable(text)).as_bytes());
}

/// Writes to `stream` after the lines waiting for the stream `other`. While there is a bar, writes above the
/// bar, to its stream: both streams are then the same terminal, so the order is preserved.
fn put(stream: &Stream, other: &Stream, bytes: &[u8]) {
    if !bar::put_above_bar(bytes) {
        other.let_go_first(ORDER);
        stream.put(bytes);
    }
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

/// Replaces characters in `text` that a terminal would interpret, because names come from other people's
/// files. Control characters except line breaks and tabs are escaped as in JSON, such as `\u001b`, so that
/// JSON remains valid.
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

/// Returns `text` as one [`printable`] line of at most `columns` columns: each run of white space becomes a
/// space, and an ellipsis replaces what does not fit.
pub fn one_line(text: &str, columns: usize) -> String {
    let words: Vec<_> = text.split_whitespace().map(printable).collect();
    let line = words.join(" ");
    let width = |c: char| c.width().unwrap_or(0);
    if line.chars().map(width).sum::<usize>() <= columns {
        return line;
    }
    let mut used = 1;
    let fits = |c: &char| {
        used += width(*c);
        used <= columns
    };
    let cut: String = line.chars().take_while(fits).collect();
    cut.trim_end().to_owned() + "…"
}

/// While a value of this type lives, writes to standard output and standard error do not wait for a reader.
#[derive(Debug)]
#[must_use]
pub struct NeverBlocks(());

/// Makes separate threads write the lines. Lines that do not fit because a reader is slow are counted and
/// dropped. Dropping the returned value waits until everything is written, or until the reader has stopped.
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

/// Waits until everything is written, or nothing more can be. Reports the lines that could not be written,
/// wherever that is possible: on the stream itself, on the other stream, or to the launcher. Call it at the
/// end of a process. Returns whether standard output has accepted every line of this process.
pub fn finish() -> bool {
    let lost = [&STDERR, &STDOUT].map(|stream| stream.finish(PATIENCE));
    for (text, other) in lost.into_iter().zip([&STDOUT, &STDERR]) {
        let Some(text) = text else { continue };
        launcher::send(Message::Note, &text);
        // If the other stream is full as well, nothing more can be done.
        other.put(format!("kiln: {text}\n").as_bytes());
        other.drain(PATIENCE);
    }
    !STDOUT.has_lost()
}

/// Reports panics with the text of Rust's own hook, but through this module, because a rank that panics must
/// not wait for a reader either.
pub fn report_panics() {
    panic::set_hook(Box::new(|panic| {
        let thread = thread::current();
        let name = thread.name().unwrap_or("<unnamed>");
        let trace = Backtrace::capture();
        let more = match trace.status() {
            BacktraceStatus::Captured => format!("stack backtrace:\n{trace}"),
            _ => "note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace".to_owned(),
        };
        eprint_line(&format!("\nthread '{name}' {panic}\n{more}"));
    }));
}

/// Returns whether lines for standard error are waiting to be written. May be called in a signal handler.
pub(super) fn has_waiting_errors() -> bool {
    STDERR.waiting() > 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped() {
        let plain = "a \u{e4}\u{4e2d}\n\tb \u{1f642}";
        assert!(matches!(printable(plain), Cow::Borrowed(text) if text == plain));
        let evil = "\u{1b}[2J\r\u{9b}31m\u{7}\u{7f}";
        assert_eq!(printable(evil), r"\u001b[2J\u000d\u009b31m\u0007\u007f");
    }

    #[test]
    fn text_is_cut_to_one_line() {
        assert_eq!(one_line(" a\n\tb  c ", 80), "a b c");
        assert_eq!(one_line("\u{1b}[2J", 80), r"\u001b[2J");
        assert_eq!(one_line("abcdef", 6), "abcdef");
        assert_eq!(one_line("abcdefg", 6), "abcde…");
        assert_eq!(one_line("abcd efg", 6), "abcd…");
        // Two columns each.
        assert_eq!(one_line("漢字漢字", 8), "漢字漢字");
        assert_eq!(one_line("漢字漢字", 7), "漢字漢…");
        assert_eq!(one_line(&"x ".repeat(10_000), 5), "x x…");
        assert_eq!((one_line("", 5), one_line("ab", 0)), (String::new(), "…".to_owned()));
    }
}
