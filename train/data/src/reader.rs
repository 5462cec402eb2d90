//! Reading documents of one format.

use std::io::Read;

use super::Result;

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

/// Lines that cannot be used.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BadLines {
    /// Their number.
    pub count: u64,
    /// The first such line, formatted as an error message.
    pub first: Option<String>,
}

impl BadLines {
    /// Adds the lines of another file.
    pub(super) fn append(&mut self, others: Self) {
        self.count += others.count;
        self.first = self.first.take().or(others.first);
    }
}
