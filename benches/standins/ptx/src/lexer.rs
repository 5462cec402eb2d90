//! Splits PTX into tokens.

use crate::error::ParseError;

/// A word, a sign or a string, with its line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lexeme<'a> {
    pub text: &'a str,
    pub line: u32,
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$' | b'%' | b'.')
}

/// Returns the tokens of `text` without comments. Two colons are part of a word, as in `shared::cta`; a single one is
/// a sign.
pub fn tokens(text: &str) -> Result<Vec<Lexeme<'_>>, ParseError> {
    let bytes = text.as_bytes();
    let mut found = Vec::new();
    let (mut at, mut line) = (0, 1);
    while at < bytes.len() {
        let start = at;
        let rest = &bytes[at..];
        if rest[0] == b'\n' {
            line += 1;
            at += 1;
        } else if rest[0].is_ascii_whitespace() {
            at += 1;
        } else if rest.starts_with(b"//") {
            at += rest.iter().position(|&b| b == b'\n').unwrap_or(rest.len());
        } else if rest.starts_with(b"/*") {
            let length =
                text[at..].find("*/").ok_or_else(|| ParseError::new(line, "unterminated comment"))?;
            line += rest[..length].iter().filter(|&&b| b == b'\n').count() as u32;
            at += length + 2;
        } else if rest[0] == b'"' {
            let length = rest[1..].iter().position(|&b| b == b'"');
            at += length.ok_or_else(|| ParseError::new(line, "unterminated string"))? + 2;
            found.push(Lexeme { text: &text[start..at], line });
        } else if is_word(rest[0]) {
            while at < bytes.len() && (is_word(bytes[at]) || bytes[at..].starts_with(b"::")) {
                at += if bytes[at] == b':' { 2 } else { 1 };
            }
            found.push(Lexeme { text: &text[start..at], line });
        } else if rest[0].is_ascii() {
            at += 1;
            found.push(Lexeme { text: &text[start..at], line });
        } else {
            return Err(ParseError::new(line, "invalid character"));
        }
    }
    Ok(found)
}
