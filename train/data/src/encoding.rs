//! Distinguishing UTF-8 text from other files.

use std::fmt;
use std::io::{self, Read};

/// The mark that some programs put in front of UTF-8 text. It is not part of the text.
pub(super) const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";

/// Number of bytes examined to identify a file that is not UTF-8 text.
pub(super) const HEAD: usize = 512;

/// Signatures of compressed files.
const COMPRESSED: [(&[u8], &str); 5] = [
    (b"\x1F\x8B", "gzip"),
    (b"\x28\xB5\x2F\xFD", "zstd"),
    (b"\xFD7zXZ\0", "xz"),
    (b"BZh", "bzip2"),
    (b"PK\x03\x04", "zip"),
];

/// The reason why a file is not UTF-8 text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NotText {
    /// Text in another encoding.
    Utf16,
    /// A compressed file. `format`: the compression format.
    Compressed { format: &'static str },
    /// A zero byte: valid UTF-8, but found in executables and images, not in text. `position`: in bytes from
    /// the start.
    ZeroByte { position: u64 },
    /// A byte that is invalid UTF-8 at its position. `position`: in bytes from the start; `is_latin`: whether
    /// it would be a letter in Latin-1, surrounded by ASCII.
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
    /// Refines the reason using `head`, the start of the file.
    pub(super) fn of(self, head: &[u8]) -> Self {
        let compressed = COMPRESSED.iter().find(|(start, _)| head.starts_with(start));
        match compressed {
            Some((_, format)) => Self::Compressed { format },
            None if is_utf16(head) => Self::Utf16,
            None => self,
        }
    }
}

/// Reports whether the file begins like UTF-16: with its byte order mark, or with ASCII in which every other
/// byte is 0.
fn is_utf16(head: &[u8]) -> bool {
    let pairs = head.as_chunks::<2>().0;
    let of_ascii = |high: usize| {
        let fitting = pairs.iter().filter(|pair| pair[high] == 0 && pair[1 - high] != 0).count();
        pairs.len() > 1 && fitting * 10 >= pairs.len() * 9
    };
    head.starts_with(b"\xFF\xFE") || head.starts_with(b"\xFE\xFF") || of_ascii(0) || of_ascii(1)
}

/// Reads to the end and reports the first byte that is not UTF-8 text.
pub(super) fn find_defect(mut reader: impl Read) -> io::Result<Option<NotText>> {
    let mut buffer = vec![0; 64 * 1024];
    // Bytes at the start of the buffer: a character cut by the end of the last read.
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

/// Reports whether the bytes begin with a single Latin-1 letter.
fn is_latin(bytes: &[u8]) -> bool {
    matches!(bytes[0], 0xC0..=0xFE) && bytes.get(1).is_some_and(u8::is_ascii)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Yields one byte at a time, so that every character is cut.
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
}
