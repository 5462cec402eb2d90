//! `.jsonl` files: every line is a JSON object whose field `text` is one document.

use super::encoding::BYTE_ORDER_MARK;
use super::reader::{DocumentReader, DocumentText};
use super::{DataError, Result};
use std::fs::File;
use std::io::{BufRead, BufReader, Cursor};
use std::path::{Path, PathBuf};

/// Reads one line at a time; blank lines are passed over.
pub(super) struct JsonLines {
    path: PathBuf,
    reader: BufReader<File>,
    /// Number of the line read last, from 1.
    line: u64,
    buffer: Vec<u8>,
}

#[derive(serde::Deserialize)]
struct Line {
    text: String,
}

impl JsonLines {
    /// Reads `file`, which errors call `path`.
    pub(super) fn new(file: File, path: &Path) -> Self {
        let reader = BufReader::with_capacity(1 << 16, file);
        Self { path: path.to_path_buf(), reader, line: 0, buffer: Vec::new() }
    }
}

impl DocumentReader for JsonLines {
    fn next_document(&mut self) -> Result<Option<DocumentText>> {
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
            let line: Line = serde_json::from_slice(line).map_err(|error| DataError::JsonLine {
                path: self.path.clone(),
                line: self.line,
                problem: describe(&error),
            })?;
            return Ok(Some(Box::new(Cursor::new(line.text))));
        }
    }
}

/// The parser's message about one line, with its own count of lines, which is always 1, left out.
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
        let mut lines = JsonLines::new(File::open(&path).unwrap(), &path);
        let mut texts = Vec::new();
        while let Some(mut document) = lines.next_document()? {
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
}
