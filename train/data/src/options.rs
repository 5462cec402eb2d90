//! Options of preparing data.

use std::path::PathBuf;

/// The inputs, the output and the options of [`prepare()`](super::prepare()).
#[derive(Clone, Debug, PartialEq)]
pub struct PrepareOptions {
    /// Files, folders and `builtin:arithmetic`, read in this order. `-` is the standard input.
    pub inputs: Vec<PathBuf>,
    /// The folder to create; it may exist if it is empty.
    pub out: PathBuf,
    /// The source of the tokenizer.
    pub tokenizer: TokenizerSource,
    /// Share of the text to validate on, above 0 and below 1.
    pub validation_fraction: f64,
    /// Seed that decides which text is held out.
    pub seed: u64,
    /// Maximum number of documents, counted from the start; `None` takes all. A document is a text file, a
    /// line of a `.jsonl` file or a row of a `.parquet` file; those without text do not count.
    pub limit: Option<u64>,
    /// True if every document starts with a start-of-text token. `None`: true if the tokenizer's post-processor
    /// puts tokens in front of a text.
    pub bos: Option<bool>,
    /// Spelling of the token that ends a document. `None`: the token named in `config.json`,
    /// `generation_config.json` or `tokenizer_config.json` next to the tokenizer, or else a special token with
    /// a usual name.
    pub end_of_text: Option<String>,
    /// True if the spelling of a special token in the text is encoded as that token. Meant for chat texts: in
    /// other text, anyone could end a document or pretend to be another speaker.
    pub special_tokens: bool,
    /// True if unusable lines of `.jsonl` files are counted and skipped; otherwise the first one is an error.
    pub skip_bad_lines: bool,
}

impl PrepareOptions {
    /// Default share of the text to validate on.
    pub const VALIDATION_FRACTION: f64 = 0.05;

    /// Creates options to prepare the folder `out` from `inputs`, with the defaults of `kiln data prepare`.
    pub fn new(inputs: Vec<PathBuf>, out: PathBuf, tokenizer: TokenizerSource) -> Self {
        Self {
            inputs,
            out,
            tokenizer,
            validation_fraction: Self::VALIDATION_FRACTION,
            seed: 0,
            limit: None,
            bos: None,
            end_of_text: None,
            special_tokens: false,
            skip_bad_lines: false,
        }
    }
}

/// The source of a tokenizer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenizerSource {
    /// Trained on the inputs, using only the first gibibyte of larger ones. `vocab_size`: maximum number of
    /// tokens.
    Train { vocab_size: usize },
    /// Read from a `tokenizer.json`.
    File(PathBuf),
}
