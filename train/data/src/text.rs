//! Plain text files: one file is one document.

use super::encoding::{BYTE_ORDER_MARK, HEAD, NotText, find_defect};
use super::reader::{DocumentReader, DocumentText};
use super::{DataError, Result};
use serde::de::IgnoredAny;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek as _, SeekFrom};
use std::path::Path;

/// The single document of a text file. The whole file is checked before any of it is returned, so that a file
/// is either used or skipped, never half used.
pub(super) struct TextFile {
    document: Option<DocumentText>,
    json: Option<Json>,
}

/// A kind of data that is read as text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Json {
    /// JSON with the field that documents have in `.jsonl` files.
    Documents,
    /// Any other JSON.
    Other,
}

/// Number of bytes at the start of a file examined to detect JSON.
const JSON_HEAD: u64 = 1 << 16;

impl Json {
    /// Returns the kind of JSON that `head`, the start of a file, consists of, if any.
    fn of(head: &[u8]) -> Option<Self> {
        let head = head.strip_prefix(BYTE_ORDER_MARK).unwrap_or(head).trim_ascii_start();
        if !head.starts_with(b"{") && !head.starts_with(b"[") {
            return None;
        }
        let values = serde_json::Deserializer::from_slice(head).into_iter::<IgnoredAny>();
        // The end of the head may cut the last value.
        let is_json = values.into_iter().all(|value| value.map_or_else(|error| error.is_eof(), |_| true));
        let has_text = head.windows(6).any(|window| window == b"\"text\"");
        is_json.then_some(if has_text { Self::Documents } else { Self::Other })
    }
}

impl TextFile {
    /// Reads `file`, which errors call `path`; the inner error says why it is not UTF-8 text.
    pub(super) fn new(file: File, path: &Path) -> Result<Result<Self, NotText>> {
        Self::read(file).map_err(DataError::io("read", path))
    }

    fn read(mut file: File) -> io::Result<Result<Self, NotText>> {
        let defect = find_defect(&file)?;
        file.rewind()?;
        let mut head = Vec::new();
        file.by_ref().take(JSON_HEAD).read_to_end(&mut head)?;
        if let Some(defect) = defect {
            return Ok(Err(defect.of(&head[..head.len().min(HEAD)])));
        }
        let start = if head.starts_with(BYTE_ORDER_MARK) { BYTE_ORDER_MARK.len() } else { 0 };
        file.seek(SeekFrom::Start(start as u64))?;
        Ok(Ok(Self { document: Some(Box::new(BufReader::new(file))), json: Json::of(&head) }))
    }

    /// Returns the kind of JSON that the file consists of, if any.
    pub(super) fn json(&self) -> Option<Json> {
        self.json
    }
}

impl DocumentReader for TextFile {
    fn next_document(&mut self) -> Result<Option<DocumentText>> {
        Ok(self.document.take())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_text_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.txt");
        let reason = |content: &[u8]| {
            std::fs::write(&path, content).unwrap();
            TextFile::new(File::open(&path).unwrap(), &path).unwrap().err().map(|why| why.to_string())
        };
        let utf16 = |order: fn(u16) -> [u8; 2]| -> Vec<u8> {
            "Kälte, nothing else\n".encode_utf16().flat_map(order).collect()
        };
        for text in [utf16(u16::to_le_bytes), utf16(u16::to_be_bytes)] {
            assert_eq!(reason(&text).as_deref(), Some("it is UTF-16"));
        }
        assert_eq!(reason(b"\xFF\xFE").as_deref(), Some("it is UTF-16"));
        assert_eq!(reason(b"\x1F\x8B\x08\0").as_deref(), Some("it is compressed with gzip"));
        assert_eq!(reason(b"PK\x03\x04\0\0").as_deref(), Some("it is compressed with zip"));
        let latin = "there is an invalid byte at position 1, as in Latin-1";
        assert_eq!(reason(b"K\xE4lte").as_deref(), Some(latin));
        let zero = "there is a zero byte at position 6";
        assert_eq!(reason(b"\x7FELF\x02\x01\0\0\0\0\0\0\0\0\0\0\x03\0\0\0").as_deref(), Some(zero));
        // Text that begins like a compressed file is still text.
        assert_eq!(reason(b"BZh is a name"), None);
        assert_eq!(reason("\u{FEFF}text".as_bytes()), None);
    }

    #[test]
    fn a_byte_order_mark_is_left_out_at_the_start_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.txt");
        for (content, expected) in [
            ("\u{FEFF}text", "text"),
            ("\u{FEFF}\u{FEFF}text\u{FEFF}", "\u{FEFF}text\u{FEFF}"),
            ("\u{FEFF}", ""),
        ] {
            std::fs::write(&path, content).unwrap();
            let mut file = TextFile::new(File::open(&path).unwrap(), &path).unwrap().ok().unwrap();
            let mut text = String::new();
            file.next_document().unwrap().unwrap().read_to_string(&mut text).unwrap();
            assert_eq!(text, expected);
        }
    }

    #[test]
    fn data_is_told_from_text() {
        let array = format!("[{}]", vec![r#"{"text": "a line", "id": 1}"#; 9000].join(",\n"));
        for (content, expected) in [
            (array.as_str(), Some(Json::Documents)),
            ("{\"text\": \"a\"}\n{\"text\": \"b\"}\n", Some(Json::Documents)),
            ("\u{FEFF}\n {\"name\": [1, 2, null]}", Some(Json::Other)),
            ("[1] Smith, 1999: a list of references", None),
            ("[note] \"text\" follows", None),
            ("{{ template }}", None),
            ("\"text\" in quotes", None),
            ("", None),
        ] {
            assert_eq!(
                Json::of(&content.as_bytes()[..content.len().min(JSON_HEAD as usize)]),
                expected,
                "{content:.40}"
            );
        }
    }
}
