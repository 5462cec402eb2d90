//! Writes lines to standard output and standard error. Lines that cannot be written are counted, not errors.
//! [`never_block`] keeps a run from waiting for a reader that has stopped, such as `less` or a terminal under Ctrl-S.

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

const PATIENCE: Duration = Duration::from_secs(2);

/// Writes a [`printable`] line to standard output. Counts the line as lost if it cannot be written.
pub fn print_line(text: &str) {
    if !is_silent() {
        put(&STDOUT, &STDERR, format!("{}\n", printable(text)).as_bytes());
    }
}

/// Writes a [`printable`] line to standard error. Counts the line as lost if it cannot be written.
pub fn eprint_line(text: &str) {
    put(&STDERR, &STDOUT, format!("{}\n", printable(text)).as_bytes());
}

/// While there is a bar, writes above the bar, to the bar's stream: both are the same terminal. Preserves order.
fn put(stream: &Stream, other: &Stream, bytes: &[u8]) {
    if !bar::put_above_bar(bytes) {
        other.let_go_first(ORDER);
        stream.put(bytes);
    }
}

/// Standard output or standard error as a writer that never fails.
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

/// Escapes the control characters in `text` as `\u001b`, except line breaks and tabs. A terminal would obey control
/// characters in names from other people's files. JSON remains valid.
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

/// Returns `text` as one [`printable`] line of at most `columns` columns, cut with an ellipsis. Each run of white space
/// becomes a space.
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

/// Keeps writes to standard output and standard error from blocking while it lives.
#[derive(Debug)]
#[must_use]
pub struct NeverBlocks(());

/// Makes separate threads write the lines. If a reader is slow, lines that do not fit are counted and dropped. Dropping
/// the returned value waits until everything is written, or until the reader has stopped.
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

/// Waits until all lines are written or cannot be, and reports lost lines on the other stream and to the launcher. Call
/// it at the end of a process. Returns whether standard output has accepted every line.
pub fn finish() -> bool {
    let lost = [&STDERR, &STDOUT].map(|stream| stream.finish(PATIENCE));
    for (text, other) in lost.into_iter().zip([&STDOUT, &STDERR]) {
        let Some(text) = text else { continue };
        launcher::send(Message::Note, &text);
        other.put(format!("kiln: {text}\n").as_bytes());
        other.drain(PATIENCE);
    }
    !STDOUT.has_lost()
}

/// Reports panics with the text of Rust's own hook, without waiting for a reader.
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

/// Async-signal-safe.
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
        assert_eq!(one_line("漢字漢字", 8), "漢字漢字");
        assert_eq!(one_line("漢字漢字", 7), "漢字漢…");
        assert_eq!(one_line(&"x ".repeat(10_000), 5), "x x…");
        assert_eq!((one_line("", 5), one_line("ab", 0)), (String::new(), "…".to_owned()));
    }
}
