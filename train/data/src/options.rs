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
    /// Whether every document starts with a token for the start of text; `None` if it does so exactly where the
    /// tokenizer's post-processor puts tokens in front of a text.
    pub bos: Option<bool>,
    /// Spelling of the token that ends a document. `None`: the one that `config.json`, `generation_config.json` or
    /// `tokenizer_config.json` beside the tokenizer names, or else a special token of a usual name.
    pub end_of_text: Option<String>,
    /// Whether the spelling of a special token in the text becomes that token: for texts of chats. In other text,
    /// anyone could end a document or pretend to be another speaker.
    pub special_tokens: bool,
    /// Whether lines of `.jsonl` files that cannot be used are counted and skipped; otherwise the first one is an
    /// error.
    pub skip_bad_lines: bool,
}

impl PrepareOptions {
    /// The share of the text to validate on if nothing else is asked for.
    pub const VALIDATION_FRACTION: f64 = 0.05;

    /// Options to make the folder `out` of `inputs`, with the defaults of `kiln data prepare`.
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

/// Where the tokenizer comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenizerSource {
    /// Trained on the inputs, on the first gibibyte if they hold more. `vocab_size`: tokens, at most.
    Train { vocab_size: usize },
    /// Read from a `tokenizer.json`.
    File(PathBuf),
}
