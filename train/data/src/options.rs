use std::path::{Path, PathBuf};

use super::chat::ChatTemplate;
use super::info::TOKENIZER_FILE;
use super::{DataError, Result};

/// Inputs, output and options of [`prepare()`](super::prepare()).
#[derive(Clone, Debug, PartialEq)]
pub struct PrepareOptions {
    /// Files, folders and `builtin:arithmetic`, read in this order. `-` is the standard input.
    pub inputs: Vec<PathBuf>,
    /// True if the inputs are conversations in `.jsonl` or `.parquet` files, of which only the assistant's tokens
    /// count. The chat template is next to the tokenizer, which is a file.
    pub chat: bool,
    /// The folder to create; it may exist if it is empty.
    pub out: PathBuf,
    /// Source of the tokenizer.
    pub tokenizer: TokenizerSource,
    /// Share of the text held out for validation, above 0 and below 1.
    pub validation_fraction: f64,
    /// Seed for choosing the text that is held out.
    pub seed: u64,
    /// Maximum number of non-empty documents; `None` takes all. A document is a text file, a line of a `.jsonl` file or
    /// a row of a `.parquet` file.
    pub limit: Option<u64>,
    /// True if every document starts with a start-of-text token. `None`: the tokenizer's post-processor decides.
    pub bos: Option<bool>,
    /// Spelling of the token that ends a document. `None`: the token named by a file next to the tokenizer, such as
    /// `config.json`, or else a special token with a usual name.
    pub end_of_text: Option<String>,
    /// True if special tokens that are spelled out in the text become special tokens. Only for trusted text, such as
    /// chats: otherwise the text can end documents.
    pub special_tokens: bool,
    /// True if unusable lines of `.jsonl` files are skipped; otherwise the first one is an error.
    pub skip_bad_lines: bool,
}

impl PrepareOptions {
    /// Returns the tokenizer file for conversations, and the chat template next to it.
    pub(super) fn chat_model(&self) -> Result<(&Path, ChatTemplate)> {
        let TokenizerSource::File(path) = &self.tokenizer else { return Err(DataError::ChatTokenizer) };
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let template = ChatTemplate::load(folder)?;
        let template = template.ok_or_else(|| DataError::NoChatTemplate { folder: folder.to_path_buf() })?;
        Ok((path, template))
    }

    /// Default share of the text to validate on.
    pub const VALIDATION_FRACTION: f64 = 0.05;

    /// Creates options to prepare the folder `out` from `inputs`, with the defaults of `kiln data prepare`.
    pub fn new(inputs: Vec<PathBuf>, out: PathBuf, tokenizer: TokenizerSource) -> Self {
        Self {
            inputs,
            chat: false,
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
    /// Trained on the first gibibyte of the inputs, with at most `vocab_size` tokens.
    Train { vocab_size: usize },
    /// Read from a `tokenizer.json`.
    File(PathBuf),
}

impl TokenizerSource {
    /// Returns the source for a `tokenizer.json`, or for the one in a folder.
    pub fn named(path: PathBuf) -> Self {
        Self::File(if path.is_dir() { path.join(TOKENIZER_FILE) } else { path })
    }
}
