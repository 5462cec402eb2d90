//! Reading documents of one format.

use std::io::Read;

use super::Result;
use super::jsonl::BadLines;

/// The text of one document, as bytes that are valid UTF-8.
pub(super) type DocumentText = Box<dyn Read + Send>;

/// A source of documents in one format. A new format implements this trait and gets
/// an arm in [`Format`](super::listing::Format) and in `Source::open` in `document.rs`.
pub(super) trait DocumentReader: Send {
    /// The next document; `None` after the last one.
    fn next_document(&mut self) -> Result<Option<DocumentText>>;

    /// Documents skipped so far because they cannot be used.
    fn skipped(&self) -> BadLines {
        BadLines::default()
    }
}
