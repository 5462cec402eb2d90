//! What to prepare, and how.

use std::path::PathBuf;

/// What to prepare, and how.
#[derive(Clone, Debug, PartialEq)]
pub struct PrepareOptions {
    /// Files, folders and `builtin:arithmetic`, read in this order. `-` is the standard input.
    pub inputs: Vec<PathBuf>,
    /// The folder to create; it may exist if it is empty.
    pub out: PathBuf,
    /// Where the tokenizer comes from.
    pub tokenizer: TokenizerSource,
    /// Share of the text to validate on, above 0 and below 1.
    pub validation_fraction: f64,
    /// Decides which text that is.
    pub seed: u64,
    /// Documents to take, the first ones; all if it is `None`. A document is a text file, a line of a `.jsonl`
    /// file or a row of a `.parquet` file; those without text do not count.
    pub limit: Option<u64>,
}

impl PrepareOptions {
    /// The share of the text to validate on if nothing else is asked for.
    pub const VALIDATION_FRACTION: f64 = 0.05;
}

/// Where the tokenizer comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenizerSource {
    /// Trained on the inputs, on the first gibibyte if they hold more. `vocab_size`: tokens, at most.
    Train { vocab_size: usize },
    /// Read from a `tokenizer.json`.
    File(PathBuf),
}
