use std::io::{self, Read};

use super::Split;
use super::cut::Cuts;

/// Preferred maximum size of a chunk in bytes; a chunk is larger where no cut is possible.
pub(super) const CHUNK_BYTES: usize = 8 * 1024;

/// Number of bytes after a candidate place that are examined to decide on a cut.
const LOOKAHEAD: usize = 4;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TextChunk {
    /// Index of the document among the non-empty documents.
    pub(super) document: u64,
    pub(super) split: Split,
    /// The text; never empty.
    pub(super) text: String,
    /// True for the first chunk of its document in its split.
    pub(super) starts: bool,
    /// True for the last chunk of its document in its split.
    pub(super) ends: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TextPiece {
    pub(super) text: String,
    pub(super) ends_section: bool,
    pub(super) ends_document: bool,
}

/// Cuts one document. A document divided between the splits is also cut there, at the end of a line if possible.
pub(super) struct Cutter {
    reader: Box<dyn Read + Send>,
    limit: usize,
    cuts: Cuts,
    /// Bytes up to the end of the first section, if there are two.
    section: Option<u64>,
    pending: Vec<u8>,
    drained: bool,
}

impl Cutter {
    /// Cuts the text of `reader` into chunks of `limit` bytes if possible. `section`: bytes before the division.
    pub(super) fn new(reader: Box<dyn Read + Send>, limit: usize, cuts: Cuts, section: Option<u64>) -> Self {
        // A chunk must have room for the longest character.
        Self { reader, limit: limit.max(4), cuts, section, pending: Vec::new(), drained: false }
    }

    pub(super) fn next(&mut self) -> io::Result<Option<TextPiece>> {
        let mut limit = self.limit;
        loop {
            self.fill(limit + LOOKAHEAD)?;
            if self.pending.is_empty() {
                return Ok(None);
            }
            let text = complete(&self.pending)?;
            let section = self.section.and_then(|left| usize::try_from(left).ok());
            if let Some(end) = section.filter(|left| *left <= text.len()) {
                let at = end_of_line(text, end);
                self.section = None;
                return self.take(at, true).map(Some);
            }
            if self.drained && text.len() <= limit {
                return self.take(text.len(), false).map(Some);
            }
            if let Some(at) = self.cuts.last_place(text, limit) {
                return self.take(at, false).map(Some);
            }
            limit *= 2;
        }
    }

    fn take(&mut self, at: usize, ends_section: bool) -> io::Result<TextPiece> {
        let rest = self.pending.split_off(at);
        let text = String::from_utf8(std::mem::replace(&mut self.pending, rest)).map_err(invalid)?;
        let ends_document = self.drained && self.pending.is_empty();
        if let Some(left) = &mut self.section {
            *left -= at as u64;
        }
        Ok(TextPiece { text, ends_section: ends_section || ends_document, ends_document })
    }

    /// Reads until more than `wanted` bytes are pending or the reader ends.
    fn fill(&mut self, wanted: usize) -> io::Result<()> {
        while !self.drained && self.pending.len() <= wanted {
            let missing = (wanted + 1 - self.pending.len()) as u64;
            let read = self.reader.by_ref().take(missing).read_to_end(&mut self.pending)?;
            self.drained = read == 0;
        }
        Ok(())
    }
}

fn complete(bytes: &[u8]) -> io::Result<&str> {
    match std::str::from_utf8(bytes) {
        Ok(text) => Ok(text),
        Err(error) if error.error_len().is_none() && error.valid_up_to() > 0 => {
            std::str::from_utf8(&bytes[..error.valid_up_to()]).map_err(invalid)
        }
        Err(error) => Err(invalid(error)),
    }
}

fn invalid(error: impl std::error::Error + Send + Sync + 'static) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

/// Returns the end of the last line, word or character in the first `end` bytes of `text`. Never 0.
fn end_of_line(text: &str, end: usize) -> usize {
    let head = &text.as_bytes()[..end];
    let newline = head.iter().rposition(|byte| *byte == b'\n').map(|at| at + 1);
    let space = || head.iter().rposition(|byte| *byte == b' ').filter(|at| *at > 0);
    newline.or_else(space).unwrap_or_else(|| match text.floor_char_boundary(end) {
        0 => text.ceil_char_boundary(1),
        at => at,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(text: &str, limit: usize, cuts: Cuts, section: Option<u64>) -> Vec<TextPiece> {
        let mut cutter = Cutter::new(Box::new(io::Cursor::new(text.to_owned())), limit, cuts, section);
        let mut pieces = Vec::new();
        while let Some(piece) = cutter.next().unwrap() {
            pieces.push(piece);
        }
        pieces
    }

    fn texts(pieces: &[TextPiece]) -> Vec<&str> {
        pieces.iter().map(|piece| piece.text.as_str()).collect()
    }

    #[test]
    fn cuts_after_lines_and_before_words() {
        assert_eq!(
            texts(&cut("one\ntwo\nthree\nfour", 9, Cuts::AT_WORDS, None)),
            ["one\ntwo\n", "three\n", "four"]
        );
        assert_eq!(texts(&cut("alpha beta", 7, Cuts::AT_WORDS, None)), ["alpha", " beta"]);
    }

    #[test]
    fn text_without_a_place_stays_whole() {
        for text in ["ééééééééé", "a  b  c  d  e", "one\n\ntwo\r\nthree", ". . . . . . . ."] {
            assert_eq!(texts(&cut(text, 4, Cuts::AT_WORDS, None)), [text]);
        }
        assert_eq!(texts(&cut("one\ntwo\nthree", 4, Cuts::default(), None)), ["one\ntwo\nthree"]);
    }

    #[test]
    fn no_character_is_lost() {
        let text = "wide words, ünïcödé 漢字 and\n\n  blank lines 🙂\nx\n".repeat(40);
        let size = text.len() as u64;
        for cuts in [Cuts::ANYWHERE, Cuts::AT_WORDS, Cuts::default()] {
            for limit in (4..200).step_by(7) {
                for section in [None, Some(1), Some(100), Some(size / 2), Some(size - 1)] {
                    let pieces = cut(&text, limit, cuts, section);
                    assert_eq!(texts(&pieces).concat(), text);
                    assert!(pieces.iter().all(|piece| !piece.text.is_empty()));
                    let ends = |piece: &&TextPiece| piece.ends_document;
                    assert!(pieces.iter().filter(ends).count() == 1 && pieces.last().unwrap().ends_document);
                    let sections = pieces.iter().filter(|piece| piece.ends_section).count();
                    assert_eq!(sections, 1 + usize::from(section.is_some()));
                    let most = pieces.iter().map(|piece| piece.text.len()).max().unwrap();
                    assert!(cuts != Cuts::ANYWHERE || most <= limit + 2 * LOOKAHEAD, "{most} by {limit}");
                }
            }
        }
    }

    #[test]
    fn sections_end_at_a_line_word_or_character() {
        let section = |text: &str, at| cut(text, 100, Cuts::AT_WORDS, Some(at))[0].text.clone();
        assert_eq!(section("one\ntwo\nthree", 9), "one\ntwo\n");
        assert_eq!(section("one two three", 9), "one two");
        assert_eq!(section("ééé", 3), "é");
        assert_eq!(section("ééé", 1), "é");
    }

    #[test]
    fn document_at_the_limit_is_one_piece() {
        let whole = TextPiece { text: "12345678".to_owned(), ends_section: true, ends_document: true };
        assert_eq!(cut("12345678", 8, Cuts::ANYWHERE, None), [whole]);
        assert!(cut("", 8, Cuts::ANYWHERE, None).is_empty());
    }
}
