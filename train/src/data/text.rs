//! Plain text files: one file is one document.

use super::DataError;
use super::document::{DocumentReader, DocumentText};
use std::fs::File;
use std::io::{self, BufReader, Read, Seek as _};
use std::path::Path;

/// The single document of a text file. It is checked as a whole before any of it is
/// handed out, so that a file is either used or passed over, never half used.
pub(super) struct TextFile {
    document: Option<DocumentText>,
}

impl TextFile {
    /// Reads `file`, which errors call `path`; the inner error says why it is not UTF-8 text.
    pub(super) fn new(mut file: File, path: &Path) -> Result<Result<Self, String>, DataError> {
        if let Some(defect) = find_defect(&file).map_err(DataError::io("read", path))? {
            return Ok(Err(defect));
        }
        file.rewind().map_err(DataError::io("read", path))?;
        Ok(Ok(Self { document: Some(Box::new(BufReader::new(file))) }))
    }
}

impl DocumentReader for TextFile {
    fn next_document(&mut self) -> Result<Option<DocumentText>, DataError> {
        Ok(self.document.take())
    }
}

/// Reads to the end and reports the first byte that is not UTF-8 text.
fn find_defect(mut reader: impl Read) -> io::Result<Option<String>> {
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
        // Valid UTF-8, but no text holds it, and executables and images do.
        if let Some(zero) = filled.iter().position(|&byte| byte == 0) {
            return Ok(Some(format!("there is a zero byte at position {}", position + zero)));
        }
        let valid = match std::str::from_utf8(filled) {
            Ok(_) => filled.len(),
            Err(error) if error.error_len().is_none() && read > 0 => error.valid_up_to(),
            Err(error) => {
                let at = position + error.valid_up_to();
                return Ok(Some(format!("there is an invalid byte at position {at}")));
            }
        };
        if read == 0 {
            return Ok(None);
        }
        position += valid;
        kept = filled.len() - valid;
        buffer.copy_within(valid..valid + kept, 0);
    }
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
        let defect = |bytes: &[u8]| find_defect(Slow(bytes)).unwrap().unwrap();
        assert_eq!(defect(b"ab\0c"), "there is a zero byte at position 2");
        assert_eq!(defect(b"ab\xFFc"), "there is an invalid byte at position 2");
        assert_eq!(defect(b"abc\xC3"), "there is an invalid byte at position 3");
    }
}
