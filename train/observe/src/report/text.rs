//! Texts of others, made safe to show.

use std::fmt::Write as _;

/// Text whose every character is seen: what a terminal or a browser would obey, such as an escape or a mark
/// that turns the direction of what follows, is spelled out.
pub(super) fn visible(text: &str) -> String {
    let mut seen = String::with_capacity(text.len());
    for c in text.chars() {
        let is_mark =
            matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        if is_mark || (c.is_control() && c != '\n' && c != '\t') {
            let _ = write!(seen, "\\u{:04x}", u32::from(c));
        } else {
            seen.push(c);
        }
    }
    seen
}

/// The first characters of a text, and a sign that there are more.
pub(super) fn cut(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{} […]", &text[..end]),
        None => text.to_owned(),
    }
}

/// A word as a shell reads it.
pub(super) fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-+=:@%".contains(c);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}
