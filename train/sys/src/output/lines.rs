//! Lines for people.

use std::borrow::Cow;

use super::bar;
use super::silence::is_silent;
use super::stream::Stream;
use super::streams::{ORDER, STDERR, STDOUT};

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

/// Replaces characters in `text` that a terminal would interpret: names come from other people's files.
/// Control characters other than the end of a line and the tab are escaped as in JSON, `\u001b`, so that JSON
/// remains valid.
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

/// Writes after the lines that wait for the other stream. While there is a bar, all lines go to its stream,
/// above it: both streams are then the same terminal, and the order is preserved.
pub(super) fn put(stream: &Stream, other: &Stream, bytes: &[u8]) {
    if bar::is_shown() {
        return bar::hidden_while(|| STDERR.put(bytes));
    }
    other.let_go_first(ORDER);
    stream.put(bytes);
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
