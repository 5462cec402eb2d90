//! Reads plain text files: one file is one document. Detects JSON and files that are not UTF-8 text.

use super::document::{DocumentReader, DocumentText};
use super::progress::Counted;
use super::{DataError, Result};
use serde::de::IgnoredAny;
use std::fmt;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek as _, SeekFrom};
use std::path::Path;

/// The single document of a text file. The whole file is validated before any text is returned.
pub(super) struct TextFile {
    document: Option<DocumentText>,
    json: Option<Json>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Json {
    /// JSON that contains the field name `"text"`, as documents in `.jsonl` files do.
    Documents,
    Other,
}

const JSON_HEAD: u64 = 1 << 16;

impl Json {
    fn detect(head: &[u8]) -> Option<Self> {
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
    /// Opens `file`; errors name `path`. The inner error is the reason why the file is not UTF-8 text.
    pub(super) fn new(file: File, path: &Path) -> Result<Result<Self, NotText>> {
        Self::read(file).map_err(DataError::io("read", path))
    }

    fn read(mut file: File) -> io::Result<Result<Self, NotText>> {
        let defect = find_defect(&file)?;
        file.rewind()?;
        let mut head = Vec::new();
        file.by_ref().take(JSON_HEAD).read_to_end(&mut head)?;
        if let Some(defect) = defect {
            return Ok(Err(defect.refine(&head[..head.len().min(HEAD)])));
        }
        let start = if head.starts_with(BYTE_ORDER_MARK) { BYTE_ORDER_MARK.len() } else { 0 };
        file.seek(SeekFrom::Start(start as u64))?;
        Ok(Ok(Self { document: Some(Box::new(BufReader::new(file))), json: Json::detect(&head) }))
    }

    pub(super) fn json(&self) -> Option<Json> {
        self.json
    }
}

impl DocumentReader for TextFile {
    fn next_document(&mut self, _: &mut Counted) -> Result<Option<DocumentText>> {
        Ok(self.document.take())
    }
}

/// The UTF-8 byte order mark, which is not part of the text.
pub(super) const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";

const HEAD: usize = 512;

const COMPRESSED: [(&[u8], &str); 5] = [
    (b"\x1F\x8B", "gzip"),
    (b"\x28\xB5\x2F\xFD", "zstd"),
    (b"\xFD7zXZ\0", "xz"),
    (b"BZh", "bzip2"),
    (b"PK\x03\x04", "zip"),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NotText {
    /// UTF-16 text.
    Utf16,
    /// Compressed data. `format`: the compression format.
    Compressed { format: &'static str },
    /// A zero byte at `position`, in bytes from the start: valid UTF-8, but typical of executables and images.
    ZeroByte { position: u64 },
    /// Invalid UTF-8 at byte `position`. `is_latin`: the byte is a Latin-1 letter followed by ASCII.
    InvalidByte { position: u64, is_latin: bool },
}

impl fmt::Display for NotText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Utf16 => f.write_str("it is UTF-16"),
            Self::Compressed { format } => write!(f, "it is compressed with {format}"),
            Self::ZeroByte { position } => write!(f, "there is a zero byte at position {position}"),
            Self::InvalidByte { position, is_latin } => {
                write!(f, "there is an invalid byte at position {position}")?;
                if *is_latin { f.write_str(", as in Latin-1") } else { Ok(()) }
            }
        }
    }
}

impl NotText {
    fn refine(self, head: &[u8]) -> Self {
        let compressed = COMPRESSED.iter().find(|(start, _)| head.starts_with(start));
        match compressed {
            Some((_, format)) => Self::Compressed { format },
            None if is_utf16(head) => Self::Utf16,
            None => self,
        }
    }
}

/// Reports whether `head` starts with a UTF-16 byte order mark, or has a zero in every other byte, as ASCII text does.
fn is_utf16(head: &[u8]) -> bool {
    let pairs = head.as_chunks::<2>().0;
    let of_ascii = |high: usize| {
        let fitting = pairs.iter().filter(|pair| pair[high] == 0 && pair[1 - high] != 0).count();
        pairs.len() > 1 && fitting * 10 >= pairs.len() * 9
    };
    head.starts_with(b"\xFF\xFE") || head.starts_with(b"\xFE\xFF") || of_ascii(0) || of_ascii(1)
}

fn find_defect(mut reader: impl Read) -> io::Result<Option<NotText>> {
    let mut buffer = vec![0; 64 * 1024];
    // Number of bytes of an incomplete character, carried over from the last read to the start of `buffer`.
    let mut kept = 0;
    let mut position = 0;
    loop {
        let read = match reader.read(&mut buffer[kept..]) {
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        let filled = &buffer[..kept + read];
        if let Some(zero) = filled.iter().position(|&byte| byte == 0) {
            return Ok(Some(NotText::ZeroByte { position: position + zero as u64 }));
        }
        let valid = match std::str::from_utf8(filled) {
            Ok(_) => filled.len(),
            Err(error) if error.error_len().is_none() && read > 0 => error.valid_up_to(),
            Err(error) => {
                let at = error.valid_up_to();
                let position = position + at as u64;
                let is_latin = error.error_len().is_some() && is_latin(&filled[at..]);
                return Ok(Some(NotText::InvalidByte { position, is_latin }));
            }
        };
        if read == 0 {
            return Ok(None);
        }
        position += valid as u64;
        kept = filled.len() - valid;
        buffer.copy_within(valid..valid + kept, 0);
    }
}

fn is_latin(bytes: &[u8]) -> bool {
    matches!(bytes[0], 0xC0..=0xFE) && bytes.get(1).is_some_and(u8::is_ascii)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Slow<'a>(&'a [u8]);

    impl Read for Slow<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let count = self.0.len().min(1);
            let (now, later) = self.0.split_at(count);
            buffer[..count].copy_from_slice(now);
            self.0 = later;
            Ok(count)
        }
    }

    #[test]
    fn characters_may_span_reads() {
        assert_eq!(find_defect(Slow("añ漢🙂\n".as_bytes())).unwrap(), None);
        let large = "é".repeat(100_000) + "x" + &"漢".repeat(100_000);
        assert_eq!(find_defect(large.as_bytes()).unwrap(), None);
    }

    #[test]
    fn defects_are_located() {
        let defect = |bytes: &[u8]| find_defect(Slow(bytes)).unwrap().unwrap().to_string();
        assert_eq!(defect(b"ab\0c"), "there is a zero byte at position 2");
        assert_eq!(defect(b"ab\xFFc"), "there is an invalid byte at position 2");
        assert_eq!(defect(b"abc\xC3"), "there is an invalid byte at position 3");
    }

    #[test]
    fn reasons_for_not_text_are_named() {
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
        assert_eq!(reason(b"BZh is a name"), None);
        assert_eq!(reason("\u{FEFF}text".as_bytes()), None);
    }

    #[test]
    fn byte_order_mark_is_removed_at_the_start() {
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
            file.next_document(&mut Counted::default()).unwrap().unwrap().read_to_string(&mut text).unwrap();
            assert_eq!(text, expected);
        }
    }

    #[test]
    fn json_is_detected() {
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
                Json::detect(&content.as_bytes()[..content.len().min(JSON_HEAD as usize)]),
                expected,
                "{content:.40}"
            );
        }
    }
}
