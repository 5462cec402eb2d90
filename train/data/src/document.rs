use std::io::Read;

use super::error::Result;
use super::progress::Counted;

/// The text of one document, as bytes that are valid UTF-8.
pub(super) type DocumentText = Box<dyn Read + Send>;

/// A source of documents in one format.
pub(super) trait DocumentReader: Send {
    /// Returns the next document; `None` after the last one. Adds skipped lines to `bad_lines`.
    fn next_document(&mut self, bad_lines: &mut Counted) -> Result<Option<DocumentText>>;
}
