//! `.jsonl` and `.ndjson` files: every line is a JSON object whose field `text` is one document.

use super::document::{DocumentReader, DocumentText};
use super::progress::Counted;
use super::text_file::BYTE_ORDER_MARK;
use super::{DataError, Result};
use std::fs::File;
use std::io::{BufRead, BufReader, Cursor};
use std::path::{Path, PathBuf};

pub(super) struct JsonLines {
    path: PathBuf,
    reader: BufReader<File>,
    line: u64,
    buffer: Vec<u8>,
    skips: bool,
}

#[derive(serde::Deserialize)]
struct Line {
    text: String,
}

impl JsonLines {
    /// Creates a reader of `file`; errors name `path`. `skips`: skip unusable lines instead of failing.
    pub(super) fn new(file: File, path: &Path, skips: bool) -> Self {
        let reader = BufReader::with_capacity(1 << 16, file);
        Self { path: path.to_path_buf(), reader, line: 0, buffer: Vec::new(), skips }
    }
}

impl DocumentReader for JsonLines {
    fn next_document(&mut self, bad_lines: &mut Counted) -> Result<Option<DocumentText>> {
        loop {
            self.buffer.clear();
            let read =
                self.reader.read_until(b'\n', &mut self.buffer).map_err(DataError::io("read", &self.path))?;
            if read == 0 {
                return Ok(None);
            }
            self.line += 1;
            let mark = if self.line == 1 { BYTE_ORDER_MARK } else { b"" };
            let line = self.buffer.strip_prefix(mark).unwrap_or(&self.buffer);
            if line.trim_ascii().is_empty() {
                continue;
            }
            match parse(line) {
                Ok(line) => return Ok(Some(Box::new(Cursor::new(line.text)))),
                Err(problem) if self.skips => {
                    let (path, line) = (self.path.display(), self.line);
                    bad_lines.add(|| format!("{path}, line {line}: {problem}"));
                }
                Err(problem) => {
                    return Err(DataError::JsonLine { path: self.path.clone(), line: self.line, problem });
                }
            }
        }
    }
}

fn parse(line: &[u8]) -> Result<Line, String> {
    // Serde would accept an array for the fields of a struct.
    if line.trim_ascii_start().starts_with(b"[") {
        return Err("a list, expected an object".to_owned());
    }
    serde_json::from_slice(line).map_err(|error| cause(line, &error))
}

/// Explains common mistakes, for which the parser's own message is only "expected value" or similar.
fn cause(line: &[u8], error: &serde_json::Error) -> String {
    let at = error.column().saturating_sub(1);
    // The parser may have stopped inside a word.
    let is_word = |byte: &u8| byte.is_ascii_alphabetic() || *byte == b'-';
    let start =
        line[..at.min(line.len())].iter().rposition(|byte| !is_word(byte)).map_or(0, |before| before + 1);
    let word: Vec<u8> = line[start..].iter().copied().take_while(is_word).collect();
    if let Some(name) = ["NaN", "Infinity", "-Infinity"].iter().find(|name| name.as_bytes() == word) {
        return format!("{name} is not JSON (column {})", start + 1);
    }
    let message = describe(error);
    if message.contains("surrogate") || message.contains("unexpected end of hex escape") {
        return format!(
            "half of a surrogate pair, as in \"\\ud83d\", is not a character (column {})",
            error.column()
        );
    }
    if message.starts_with("invalid type: null") {
        return format!("the field `text` is null, expected a string (column {})", error.column());
    }
    message
}

/// Formats the parser's message about one line, without the line number, which is always 1.
pub fn describe(error: &serde_json::Error) -> String {
    let message = error.to_string();
    let message = message.split(" at line ").next().unwrap_or(&message);
    format!("{message} (column {})", error.column())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    fn read_all(content: &str) -> Result<Vec<String>, DataError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.jsonl");
        std::fs::write(&path, content).unwrap();
        let mut lines = JsonLines::new(File::open(&path).unwrap(), &path, false);
        let mut texts = Vec::new();
        while let Some(mut document) = lines.next_document(&mut Counted::default())? {
            let mut text = String::new();
            document.read_to_string(&mut text).unwrap();
            texts.push(text);
        }
        Ok(texts)
    }

    #[test]
    fn reads_the_field_text() {
        let texts = read_all("{\"text\": \"a\\nb\", \"id\": 1}\r\n\n{\"text\":\"c\"}").unwrap();
        assert_eq!(texts, ["a\nb", "c"]);
        let texts = read_all("\u{FEFF}{\"text\": \"\u{FEFF}a\"}\n").unwrap();
        assert_eq!(texts, ["\u{FEFF}a"]);
    }

    #[test]
    fn errors_name_the_line() {
        let message = |content| read_all(content).unwrap_err().to_string();
        let missing = message("{\"text\": \"a\"}\n\n{\"body\": \"b\"}\n");
        assert!(missing.contains("a.jsonl, line 3: missing field `text` (column 13)"), "{missing}");
        let broken = message("{\"text\": \"a\"\n");
        assert!(broken.contains("line 1: EOF while parsing an object"), "{broken}");
        let wrong = message("{\"text\": 7}\n");
        assert!(wrong.contains("line 1: invalid type: integer `7`"), "{wrong}");
    }

    #[test]
    fn causes_are_readable() {
        let message = |content: &str| read_all(content).unwrap_err().to_string();
        for (content, expected) in [
            (r#"{"text": "a", "score": NaN}"#, "line 1: NaN is not JSON (column 24)"),
            (r#"{"score": Infinity, "text": "a"}"#, "line 1: Infinity is not JSON (column 11)"),
            (r#"{"score": -Infinity, "text": "a"}"#, "line 1: -Infinity is not JSON (column 11)"),
            (r#"{"text": "cut \ud83d and more"}"#, "half of a surrogate pair"),
            (r#"{"text": "cut \ude42 and more"}"#, "half of a surrogate pair"),
            (r#"{"text": "cut \ud83d"}"#, "half of a surrogate pair"),
            (r#"{"text": null}"#, "the field `text` is null"),
            (r#"["a"]"#, "line 1: a list, expected an object"),
        ] {
            let message = message(content);
            assert!(message.contains(expected), "{content}: {message}");
            assert!(message.contains("data.bad_lines = \"skip\""), "{message}");
        }
    }

    #[test]
    fn bad_lines_are_skipped_and_counted() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.jsonl");
        std::fs::write(&path, "{\"text\": NaN}\n{\"text\": \"a\"}\n[]\n{\"text\": \"b\"}\n{\"te").unwrap();
        let mut lines = JsonLines::new(File::open(&path).unwrap(), &path, true);
        let (mut count, mut skipped) = (0, Counted::default());
        while lines.next_document(&mut skipped).unwrap().is_some() {
            count += 1;
        }
        assert_eq!((count, skipped.count), (2, 3));
        assert!(skipped.first[0].ends_with("a.jsonl, line 1: NaN is not JSON (column 10)"));
    }
}
