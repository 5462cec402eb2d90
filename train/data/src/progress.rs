//! How far the preparation of data is.

use std::sync::atomic::{AtomicBool, Ordering};

use super::{DataError, Remark, Result, Stream};

/// What [`prepare()`](super::prepare()) is doing, and what it has noticed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Inputs that are no regular files, such as pipes, are being read to their ends. Reported once, at the
    /// start, if there are any. `streams`: what they are.
    ReadingStreams { streams: Vec<Stream> },
    /// A tokenizer is being trained: the words of the text are counted. Reported at the start, and every two
    /// megabytes. `input_bytes`: size of all input files, or what is read of them if that is less;
    /// `text_bytes`: text read so far.
    TrainingTokenizer { input_bytes: u64, text_bytes: u64 },
    /// All words have been counted, and pairs of tokens are merged. Not reported for less than two megabytes.
    MergingTokens,
    /// Text is being encoded. Reported every two megabytes, or after a document of more that the tokenizer needs
    /// whole. `input_bytes`: size of all input files;
    /// `text_bytes`: text encoded so far. It is less than the files hold in `.jsonl` files, and may be more
    /// in `.parquet` files; `documents`: documents finished so far; `tokens`: tokens written so far.
    Encoding { input_bytes: u64, text_bytes: u64, documents: u64, tokens: u64 },
    /// Something that whoever prepares the data should know. Reported when it is noticed.
    Remark(Remark),
}

/// Hears of [`Progress`].
pub type OnProgress<'a> = &'a mut (dyn FnMut(Progress) + Send);

/// Fails once `stop` is true.
pub(super) fn check(stop: &AtomicBool) -> Result<()> {
    if stop.load(Ordering::Relaxed) { Err(DataError::Stopped) } else { Ok(()) }
}
