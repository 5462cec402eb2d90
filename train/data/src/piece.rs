//! Cutting a stream of text into chunks of bounded size.

use std::io::{self, Read};

/// The largest chunk, in bytes, of a corpus of ordinary size.
const LARGEST: u64 = 8 * 1024;
/// The largest chunk of a very small corpus. Shorter ones would tear text apart.
const SMALLEST: u64 = 1024;
/// TextChunks that even a small corpus should have, so that a split of a few percent can
/// be close to the share asked for.
const WANTED: u64 = 200;

/// A stretch of one document. The chunks of a document, put together, are its text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextChunk {
    /// Position of the document among those that hold any text, from 0.
    pub document: u64,
    /// The text; never empty.
    pub text: String,
    /// Whether this is the last chunk of its document.
    pub ends_document: bool,
}

/// The limit on the size of chunks, in bytes, for a corpus of `corpus_bytes`.
pub(super) fn chunk_limit(corpus_bytes: u64) -> usize {
    (corpus_bytes / WANTED).clamp(SMALLEST, LARGEST) as usize
}

/// Cuts one document. A chunk ends with a line where it can, otherwise before a
/// space, otherwise between two characters.
pub(super) struct Cutter {
    reader: Box<dyn Read + Send>,
    limit: usize,
    /// Bytes that were read and belong to no chunk yet.
    pending: Vec<u8>,
    /// Whether the reader has been read to its end.
    drained: bool,
}

impl Cutter {
    /// Cuts what `reader` yields to chunks of at most `limit` bytes.
    pub(super) fn new(reader: Box<dyn Read + Send>, limit: usize) -> Self {
        // A chunk must have room for the longest character.
        Self { reader, limit: limit.max(4), pending: Vec::new(), drained: false }
    }

    /// The next chunk and whether it is the last one; `None` once there is no more text.
    pub(super) fn next(&mut self) -> io::Result<Option<(String, bool)>> {
        self.fill()?;
        if self.pending.is_empty() {
            return Ok(None);
        }
        let last = self.pending.len() <= self.limit;
        let rest = if last { Vec::new() } else { self.pending.split_off(self.cut()) };
        let text = String::from_utf8(std::mem::replace(&mut self.pending, rest))
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.utf8_error()))?;
        Ok(Some((text, last)))
    }

    /// Reads until more than one chunk is pending or the reader is drained, so that
    /// whether a chunk is the last one is known when it is handed out.
    fn fill(&mut self) -> io::Result<()> {
        while !self.drained && self.pending.len() <= self.limit {
            let wanted = (self.limit + 1 - self.pending.len()) as u64;
            let read = self.reader.by_ref().take(wanted).read_to_end(&mut self.pending)?;
            self.drained = read == 0;
        }
        Ok(())
    }

    /// Where to cut the pending bytes, which are more than `limit`.
    fn cut(&self) -> usize {
        let head = &self.pending[..self.limit];
        if let Some(newline) = head.iter().rposition(|&byte| byte == b'\n') {
            return newline + 1;
        }
        // The space goes to the next chunk: in a byte-level vocabulary words begin
        // with the space before them.
        if let Some(space) = head.iter().rposition(|&byte| byte == b' ').filter(|&at| at > 0) {
            return space;
        }
        let mut at = self.limit;
        // In invalid UTF-8 the search may reach the start; the conversion then reports it.
        while at > 1 && self.pending[at] & 0b1100_0000 == 0b1000_0000 {
            at -= 1;
        }
        at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(text: &str, limit: usize) -> Vec<(String, bool)> {
        let mut cutter = Cutter::new(Box::new(io::Cursor::new(text.to_owned())), limit);
        let mut chunks = Vec::new();
        while let Some(chunk) = cutter.next().unwrap() {
            chunks.push(chunk);
        }
        chunks
    }

    #[test]
    fn cuts_after_lines() {
        let chunks = cut("one\ntwo\nthree\nfour", 9);
        let expected = [("one\ntwo\n", false), ("three\n", false), ("four", true)];
        assert_eq!(chunks, expected.map(|(text, last)| (text.to_owned(), last)));
    }

    #[test]
    fn cuts_long_lines_before_spaces_and_between_characters() {
        assert_eq!(cut("alpha beta", 7)[1], (" beta".to_owned(), true));
        assert_eq!(cut("ééé", 5)[0], ("éé".to_owned(), false));
    }

    #[test]
    fn loses_nothing_and_keeps_to_the_limit() {
        let text = "wide words, ünïcödé 漢字 and\n\n  blank lines 🙂\n".repeat(40);
        for limit in 4..200 {
            let chunks = cut(&text, limit);
            let whole: String = chunks.iter().map(|(chunk, _)| chunk.as_str()).collect();
            assert_eq!(whole, text);
            assert!(chunks.iter().all(|(chunk, _)| !chunk.is_empty() && chunk.len() <= limit));
            let lasts = chunks.iter().filter(|(_, last)| *last).count();
            assert!(lasts == 1 && chunks[chunks.len() - 1].1);
        }
    }

    #[test]
    fn a_document_of_exactly_the_limit_is_one_piece() {
        assert_eq!(cut("12345678", 8), [("12345678".to_owned(), true)]);
        assert!(cut("", 8).is_empty());
    }

    #[test]
    fn small_corpora_get_small_pieces() {
        assert_eq!(chunk_limit(1000), 1024);
        assert_eq!(chunk_limit(400_000), 2000);
        assert_eq!(chunk_limit(1 << 40), 8192);
    }
}
