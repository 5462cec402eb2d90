use std::io;
use std::path::{Path, PathBuf};

use kiln_sys::durable::parent_of;
use kiln_sys::files;

pub(super) type Result<T, E = DataError> = std::result::Result<T, E>;

/// A failure while preparing or reading data. Messages name the file, line or key at fault and a fix.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// The user requested a stop before the data was complete.
    #[error("stopped on request while data was prepared; run the command again to start over")]
    Stopped,
    /// No input was given.
    #[error("no input given; name at least one text file, folder or builtin:arithmetic")]
    NoInputs,
    /// An input or a tokenizer does not exist.
    #[error(
        "{} does not exist; check its spelling (relative paths start at the current folder)",
        path.display()
    )]
    Missing { path: PathBuf },
    /// The folder that should hold prepared data does not exist.
    #[error(
        "data.path names {}, which does not exist; create it with `kiln data prepare --input <text> \
         --vocab-size <N> --out {}`, or correct data.path",
        path.display(), path.display()
    )]
    NoFolder { path: PathBuf },
    /// An unknown `builtin:` name. `known`: the names that exist.
    #[error("there is no built-in text {name:?}; use one of: {known}")]
    UnknownBuiltin { name: String, known: String },
    /// A file named as an input does not hold UTF-8 text. `problem`: where and why.
    #[error("{} is not UTF-8 text: {problem}; convert the file or omit it", path.display())]
    NotText { path: PathBuf, problem: String },
    /// A line of a `.jsonl` file could not be used.
    #[error(
        "{}, line {line}: {problem}; every line must be an object such as {{\"text\": \"...\"}}. To skip such lines, \
         set data.bad_lines = \"skip\" (`kiln data prepare --bad-lines skip`)",
        path.display()
    )]
    JsonLine { path: PathBuf, line: u64, problem: String },
    /// An input is a `.parquet` file, which this build cannot read.
    #[error(
        "{} is a Parquet file, which this build cannot read; rebuild with `--features parquet`",
        path.display()
    )]
    ParquetDisabled { path: PathBuf },
    /// A `.parquet` file could not be read.
    #[error(
        "cannot read {} as Parquet: {problem}; it needs a string column named `text`, stored \
         plain or compressed with Snappy or gzip",
        path.display()
    )]
    Parquet { path: PathBuf, problem: String },
    /// A folder could not be walked.
    #[error("cannot list the files of {}: {problem}; check that you may read the folder", path.display())]
    Walk { path: PathBuf, problem: String },
    /// The inputs hold no text. `skipped`: files skipped because they are not UTF-8 text.
    #[error(
        "the inputs hold no text ({files} {} found, {skipped} of them not UTF-8); hidden and \
         ignored files and folders named `target` are not read",
        if *files == 1 { "file" } else { "files" }
    )]
    NoText { files: usize, skipped: u64 },
    /// All inputs are empty.
    #[error("no text came from {}; check that the program that writes it succeeds", joined(inputs))]
    EmptyInputs { inputs: Vec<PathBuf> },
    /// The text is too short for a training and a validation split.
    #[error(
        "the inputs hold only {bytes} bytes of text, too few to split into training and \
         validation; add more text"
    )]
    TooLittleText { bytes: u64 },
    /// The validation fraction is out of range.
    #[error("the validation fraction is {fraction}; it must be above 0 and below 1, such as 0.05")]
    ValidationFraction { fraction: f64 },
    /// The requested vocabulary cannot hold every byte.
    #[error(
        "a vocabulary of {requested} tokens is too small; it needs at least {minimum}: one for \
         each of the 256 bytes and one for the end of text"
    )]
    VocabularyTooSmall { requested: usize, minimum: usize },
    /// The requested vocabulary is too large for token ids.
    #[error("a vocabulary of {requested} tokens is too large; the most is {maximum}")]
    VocabularyTooLarge { requested: usize, maximum: usize },
    /// Training a tokenizer failed.
    #[error("training the tokenizer failed: {problem}; check the input text")]
    TokenizerTraining { problem: String },
    /// A tokenizer file could not be used.
    #[error(
        "{} is not a usable tokenizer: {problem}; give a tokenizer.json in the format of the \
         `tokenizers` library",
        path.display()
    )]
    TokenizerFile { path: PathBuf, problem: String },
    /// A model has no chat template.
    #[error(
        "{} has no chat template: it has neither chat_template.jinja nor tokenizer_config.json with the key \
         chat_template; name the folder of a model that was trained on conversations",
        folder.display()
    )]
    NoChatTemplate { folder: PathBuf },
    /// A chat template is invalid, refuses the conversation, or exceeds its limits.
    #[error("the chat template of {}: {problem}", path.display())]
    ChatTemplate { path: PathBuf, problem: String },
    /// The tokenizer has no end-of-text token. `known`: spellings searched for; `special`: its special tokens.
    #[error(
        "the end-of-text token is unknown: no special token of the tokenizer is one of {known}. Its special tokens are: \
         {}. Name one with data.end_of_text, `--end-of-text` of `kiln data prepare`, or eos_token_id in a config.json \
         next to the tokenizer",
        if special.is_empty() { "none" } else { special }
    )]
    NoEndOfText { known: String, special: String },
    /// A requested token is not in the vocabulary. `special`: the tokenizer's special tokens.
    #[error(
        "data.end_of_text = {spelling:?} is not in the vocabulary of the tokenizer; its special tokens are: {}",
        if special.is_empty() { "none" } else { special }
    )]
    UnknownToken { spelling: String, special: String },
    /// Documents should start with a start-of-text token, which the tokenizer does not have.
    #[error(
        "data.bos = true, but the tokenizer has no token that starts a text: its post-processor adds none, and no \
         special token has such a name. Leave data.bos at \"auto\", or name bos_token_id in a config.json next to \
         the tokenizer"
    )]
    NoStartOfText,
    /// Text could not be turned into tokens.
    #[error("the tokenizer could not encode a text: {problem}; use a byte-level tokenizer")]
    Encode { problem: String },
    /// Tokens could not be turned into text.
    #[error("the tokenizer could not decode tokens: {problem}; check that the tokenizer belongs to the data")]
    Decode { problem: String },
    /// The output folder already holds prepared data.
    #[error("{} already holds prepared data; remove it or choose another folder", path.display())]
    AlreadyPrepared { path: PathBuf },
    /// The folder was prepared from different inputs or options than are requested now.
    #[error(
        "{} was prepared from different text or options than requested now:\n  {}\n\
         To use it as it is, omit data.text: --set data.text=[]\n\
         To keep it and prepare a new folder: --set data.path={}-2\n\
         To replace it, remove {} first",
        path.display(), differences.join("\n  "), path.display(), path.display()
    )]
    PreparedFromOther { path: PathBuf, differences: Vec<String> },
    /// The folder describes other samples than the program's source makes now.
    #[error(
        "{} describes other samples:\n  {}\n\
         To keep it, name a new folder: --set data.path={}-2\n\
         To replace it, remove {} first",
        path.display(), differences.join("\n  "), path.display(), path.display()
    )]
    OtherSource { path: PathBuf, differences: Vec<String> },
    /// The output path cannot be used for a new folder.
    #[error("cannot prepare data in {}: {problem}; choose another folder", path.display())]
    Output { path: PathBuf, problem: String },
    /// A folder is not prepared data, or is incomplete. `file`: the missing file.
    #[error(
        "{} has no {file}, so it is not a folder of prepared data; run `kiln data prepare` or check the path",
        folder.display()
    )]
    NotPrepared { folder: PathBuf, file: &'static str },
    /// `data.json` is invalid. `problem`: the key or line at fault and why.
    #[error("{}: {problem}; correct the file or run `kiln data prepare` again", path.display())]
    Info { path: PathBuf, problem: String },
    /// `data.json` has format version `found`, but this build reads version `supported`.
    #[error(
        "{}: `format_version` is {found}, and this build reads {supported}; run `kiln data prepare` again",
        path.display()
    )]
    Version { path: PathBuf, found: u64, supported: u64 },
    /// A token file has `actual` bytes, but the `tokens` stated by `data.json` take `expected` bytes.
    #[error(
        "{} has {actual} bytes, but data.json states {tokens} tokens, which take {expected} \
         bytes; copy the file again or run `kiln data prepare` again",
        path.display()
    )]
    FileSize { path: PathBuf, tokens: u64, expected: u64, actual: u64 },
    /// A token file holds less than one sample.
    #[error(
        "{} has {tokens} tokens, and one sample with data.seq_len = {seq_len} needs {}; prepare \
         more text or lower data.seq_len",
        path.display(), seq_len.saturating_add(1)
    )]
    TooFewTokens { path: PathBuf, tokens: u64, seq_len: u64 },
    /// The sequence length is zero.
    #[error("the sequence length is 0; it must be at least 1")]
    ZeroSequenceLength,
    /// A sample order was requested for zero samples.
    #[error("there are no samples to order; prepare more text or shorten the sequence length")]
    NoSamples,
    /// A sample is past the end of the file.
    #[error(
        "{} has {samples} samples, so there is no sample {sample}; the last one is {}",
        path.display(), samples - 1
    )]
    SampleOutOfRange { path: PathBuf, sample: u64, samples: u64 },
    /// A program's own source of samples has failed.
    #[error("data.source = \"{name}\": {reason}")]
    Source { name: String, reason: String },
    /// A token file was truncated from `expected` to `actual` bytes while it was open.
    #[error(
        "{} became shorter while it was in use: it had {expected} bytes and has {actual} now, so \
         sample {sample} cannot be read; another program writes to the file. Restore it, or run \
         `kiln data prepare` again",
        path.display()
    )]
    Truncated { path: PathBuf, sample: u64, expected: u64, actual: u64 },
    /// The token at `position`, counted from 0, has an `id` outside the vocabulary stated by `data.json`.
    #[error(
        "{}: token {position} is {id}, outside the vocabulary of {vocab_size}; the file does not \
         belong to its data.json: run `kiln data prepare` again",
        path.display()
    )]
    TokenOutOfRange { path: PathBuf, position: u64, id: u32, vocab_size: usize },
    /// Tokens `first` to `last`, which form one block, do not match their checksum.
    #[error(
        "tokens {first} to {last} of {} do not match their checksum: one of the two has changed since \
         they were prepared. `kiln data verify {}` checks the whole folder; copy the folder again or run `kiln \
         data prepare` again",
        path.display(), parent_of(path).display()
    )]
    ChangedTokens { path: PathBuf, first: u64, last: u64 },
    /// The block checksums of a token file cannot be used.
    #[error(
        "{}: {problem}, so its tokens cannot be checked; copy the folder again or run `kiln \
         data prepare` again",
        path.display()
    )]
    BlockSums { path: PathBuf, problem: String },
    /// A folder differs from the data that was prepared.
    #[error(
        "{} is damaged:{}\nCopy the folder again or run `kiln data prepare` again",
        folder.display(),
        problems.iter().map(|problem| format!("\n  - {problem}")).collect::<String>()
    )]
    Damaged { folder: PathBuf, problems: Vec<String> },
    /// The operating system refused a file operation.
    #[error("cannot {action} {}: {source}; {}", path.display(), files::advice(source))]
    Io { action: &'static str, path: PathBuf, source: io::Error },
}

impl DataError {
    /// Reports whether arguments or configuration are at fault, rather than a damaged file.
    pub fn is_usage(&self) -> bool {
        matches!(
            self,
            Self::NoInputs
                | Self::Missing { .. }
                | Self::NoFolder { .. }
                | Self::UnknownBuiltin { .. }
                | Self::ParquetDisabled { .. }
                | Self::NotPrepared { .. }
                | Self::ValidationFraction { .. }
                | Self::VocabularyTooSmall { .. }
                | Self::VocabularyTooLarge { .. }
                | Self::UnknownToken { .. }
                | Self::NoStartOfText
                | Self::AlreadyPrepared { .. }
                | Self::PreparedFromOther { .. }
                | Self::OtherSource { .. }
                | Self::Output { .. }
                | Self::TooFewTokens { .. }
                | Self::Source { .. }
        )
    }

    /// Returns a closure for `map_err` that adds the attempted action and the path.
    pub(super) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Io { action, path, source }
    }
}

fn joined(paths: &[PathBuf]) -> String {
    let names: Vec<_> = paths.iter().map(|path| path.display().to_string()).collect();
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_name_the_file_and_the_remedy() {
        let error = DataError::FileSize { path: "d/train.bin".into(), tokens: 10, expected: 20, actual: 7 };
        assert_eq!(
            error.to_string(),
            "d/train.bin has 7 bytes, but data.json states 10 tokens, which take 20 bytes; copy \
             the file again or run `kiln data prepare` again"
        );
        let error =
            DataError::JsonLine { path: "a.jsonl".into(), line: 3, problem: "no field `text`".into() };
        assert!(error.to_string().starts_with("a.jsonl, line 3: no field `text`;"));
    }

    #[test]
    fn errors_can_cross_threads() {
        fn check<T: Send + Sync + 'static>() {}
        check::<DataError>();
    }
}
