//! Progress of preparing data.

use std::sync::atomic::{AtomicBool, Ordering};

use super::{DataError, Remark, Result, Stream};

/// The current activity of [`prepare()`](super::prepare()), and its remarks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Inputs that are not regular files, such as pipes, are being read to their ends. Reported once, at the
    /// start, if there are any. `streams`: their kinds.
    ReadingStreams { streams: Vec<Stream> },
    /// A tokenizer is being trained: the words of the text are counted. Reported at the start, and every two
    /// megabytes. `input_bytes`: size of all input files, or of the part to be read if that is less;
    /// `text_bytes`: text read so far.
    TrainingTokenizer { input_bytes: u64, text_bytes: u64 },
    /// All words have been counted, and pairs of tokens are being merged. Not reported for less than two
    /// megabytes.
    MergingTokens,
    /// Text is being encoded. Reported every two megabytes, or after a larger document that the tokenizer
    /// must encode whole. `input_bytes`: size of all input files; `text_bytes`: text encoded so far, which is
    /// less than the file size for `.jsonl` files and may be more for `.parquet` files; `documents`:
    /// documents finished so far; `tokens`: tokens written so far.
    Encoding { input_bytes: u64, text_bytes: u64, documents: u64, tokens: u64 },
    /// A remark for the user who prepares the data. Reported when noticed.
    Remark(Remark),
}

/// A callback that receives [`Progress`].
pub type OnProgress<'a> = &'a mut (dyn FnMut(Progress) + Send);

/// Fails once `stop` is true.
pub(super) fn check(stop: &AtomicBool) -> Result<()> {
    if stop.load(Ordering::Relaxed) { Err(DataError::Stopped) } else { Ok(()) }
}
