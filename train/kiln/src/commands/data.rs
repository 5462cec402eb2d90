//! The commands `kiln data prepare`, `show` and `verify`.

mod show;

use std::path::PathBuf;

use clap::Args;
use kiln_config::BadLines;
use kiln_data::{PrepareOptions, TokenizerSource};
use kiln_train::error::Result;
use kiln_train::prepared::{prepare, verify};
use kiln_train::process::stop_on_signals;

pub(crate) use show::ShowArgs;

/// Arguments of `kiln data prepare`.
#[derive(Args)]
pub(crate) struct PrepareArgs {
    /// Text, .jsonl (field "text") or .parquet files, or folders of them; "-" reads standard input.
    #[arg(long, required_unless_present = "chat", num_args = 1.., value_name = "FILE|DIR")]
    input: Vec<String>,
    /// Conversations instead of text: .jsonl or .parquet files with `messages`, `conversations`, or `instruction` and
    /// `output`. The assistant's turns count. --tokenizer names a model with a chat template.
    #[arg(long, conflicts_with_all = ["input", "vocab_size", "bos", "special_tokens"], num_args = 1..,
        value_name = "FILE|DIR")]
    chat: Vec<String>,
    /// Folder to create.
    #[arg(long)]
    out: PathBuf,
    #[command(flatten)]
    tokenizer: TokenizerArgs,
    /// Fraction of the text to hold out for validation.
    #[arg(long, allow_negative_numbers = true, default_value_t = PrepareOptions::VALIDATION_FRACTION)]
    validation_fraction: f64,
    /// Seed of the choice of held-out text.
    #[arg(long, allow_negative_numbers = true, default_value_t = 0)]
    seed: u64,
    /// Use only the first N documents with text. A document is a text file, a line of a .jsonl file or a row of a
    /// .parquet file.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    limit: Option<u64>,
    /// Start documents with the beginning-of-text token: true, false, or auto (as in the tokenizer's post-processor).
    #[arg(long, value_name = "BOS", default_value = "auto", value_parser = parse_bos)]
    bos: Bos,
    /// Token that ends a document [default: as named by the tokenizer and the files next to it].
    #[arg(long, value_name = "TOKEN", allow_hyphen_values = true)]
    end_of_text: Option<String>,
    /// Recognize special tokens in the text, as in chat transcripts.
    #[arg(long)]
    special_tokens: bool,
    /// Treatment of invalid lines in .jsonl files.
    #[arg(long, value_name = "WHAT", default_value = "error")]
    bad_lines: BadLines,
}

/// True if every document starts with the beginning-of-text token; `None` if the tokenizer decides.
#[derive(Clone, Copy)]
struct Bos(Option<bool>);

fn parse_bos(text: &str) -> Result<Bos, String> {
    match text {
        "auto" => Ok(Bos(None)),
        "true" => Ok(Bos(Some(true))),
        "false" => Ok(Bos(Some(false))),
        _ => Err("expected auto, true or false".to_owned()),
    }
}

/// Arguments of `kiln data verify`.
#[derive(Args)]
pub(crate) struct VerifyArgs {
    /// Folder of prepared data.
    folder: PathBuf,
}

#[derive(Args)]
#[group(required = true, multiple = false)]
struct TokenizerArgs {
    /// Train a byte-level BPE tokenizer with this vocabulary size.
    #[arg(long, value_name = "N")]
    vocab_size: Option<usize>,
    /// Use an existing tokenizer: a tokenizer.json, or the folder of a model.
    #[arg(long, value_name = "FILE|DIR")]
    tokenizer: Option<PathBuf>,
}

impl PrepareArgs {
    pub(crate) fn run(self) -> Result<()> {
        let tokenizer = match (self.tokenizer.tokenizer, self.tokenizer.vocab_size) {
            (Some(path), _) => TokenizerSource::named(path),
            (None, vocab_size) => TokenizerSource::Train {
                // The argument parser requires one of the two.
                vocab_size: vocab_size.unwrap_or_default(),
            },
        };
        let inputs = [&self.input[..], &self.chat].concat().iter().map(PathBuf::from).collect();
        let options = PrepareOptions {
            chat: !self.chat.is_empty(),
            validation_fraction: self.validation_fraction,
            seed: self.seed,
            limit: self.limit,
            bos: self.bos.0,
            end_of_text: self.end_of_text,
            special_tokens: self.special_tokens,
            skip_bad_lines: self.bad_lines == BadLines::Skip,
            ..PrepareOptions::new(inputs, self.out, tokenizer)
        };
        prepare(&options, &stop_on_signals())?;
        Ok(())
    }
}

impl VerifyArgs {
    pub(crate) fn run(self) -> Result<String> {
        Ok(verify(&self.folder)?)
    }
}
