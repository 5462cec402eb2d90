use super::{DataError, Result, Stream};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};

/// The current activity of [`prepare()`](super::prepare()), and its remarks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Inputs that are not regular files are being read to their ends. Reported once. `streams`: their kinds.
    ReadingStreams { streams: Vec<Stream> },
    /// The words of the text are being counted for a tokenizer. `input_bytes`: size of all input files, up to the
    /// training limit; `text_bytes`: bytes of text read so far.
    TrainingTokenizer { input_bytes: u64, text_bytes: u64 },
    /// All words have been counted, and pairs of tokens are being merged.
    MergingTokens,
    /// Text is being encoded. `input_bytes`: size of all input files; `text_bytes`: bytes of text encoded so far;
    /// `documents`: documents finished so far; `tokens`: tokens written so far.
    Encoding { input_bytes: u64, text_bytes: u64, documents: u64, tokens: u64 },
    /// A remark for the user.
    Remark(Remark),
}

/// A callback that receives [`Progress`].
pub type OnProgress<'a> = &'a mut (dyn FnMut(Progress) + Send);

pub(super) fn check(stop: &AtomicBool) -> Result<()> {
    if stop.load(Ordering::Relaxed) { Err(DataError::Stopped) } else { Ok(()) }
}

/// A remark for the user who prepares the data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remark {
    message: String,
    is_warning: bool,
}

impl Remark {
    pub(super) fn note(message: String) -> Self {
        Self { message, is_warning: false }
    }

    pub(super) fn warning(message: String) -> Self {
        Self { message, is_warning: true }
    }

    /// Reports whether the remark is a warning: text may be missing, or the user must act.
    pub fn is_warning(&self) -> bool {
        self.is_warning
    }
}

impl fmt::Display for Remark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// Maximum number of items that a message lists; the others are only counted.
pub(super) const NAMED: usize = 5;

/// Items of a remark: their number, and the first few of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Counted {
    pub(super) count: u64,
    pub(super) first: Vec<String>,
}

impl Counted {
    pub(super) fn add(&mut self, item: impl FnOnce() -> String) {
        if self.first.len() < NAMED {
            self.first.push(item());
        }
        self.count += 1;
    }

    pub(super) fn append(&mut self, others: Self) {
        let room = NAMED - self.first.len();
        self.first.extend(others.first.into_iter().take(room));
        self.count += others.count;
    }

    pub(super) fn choose(&self, one: &'static str, many: &'static str) -> &'static str {
        if self.count == 1 { one } else { many }
    }
}

impl FromIterator<String> for Counted {
    fn from_iter<I: IntoIterator<Item = String>>(items: I) -> Self {
        let mut counted = Self::default();
        items.into_iter().for_each(|item| counted.add(|| item));
        counted
    }
}

impl fmt::Display for Counted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.first.join(", "))?;
        match self.count - self.first.len() as u64 {
            0 => Ok(()),
            more => write!(f, ", and {more} more"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_items_are_counted() {
        let items = |count: u32| (0..count).map(|index| index.to_string()).collect::<Counted>();
        assert_eq!(items(8).to_string(), "0, 1, 2, 3, 4, and 3 more");
        assert_eq!(items(5).to_string(), "0, 1, 2, 3, 4");
        let mut both = items(3);
        both.append(items(4));
        assert_eq!(both.to_string(), "0, 1, 2, 0, 1, and 2 more");
    }
}
