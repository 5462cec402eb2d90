//! Everything that can go wrong between a text file and a batch.

use std::io;
use std::path::{Path, PathBuf};

use kiln_storage::files;

/// A failure while preparing or reading data. Every message names the file, line or
/// key at fault and what to do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// Somebody asked for a stop before the data was whole.
    #[error("stopped as asked while data was prepared: there was nothing to save yet; start it again")]
    Stopped,
    /// No input was given.
    #[error("no input given; name at least one text file, folder or builtin:arithmetic")]
    NoInputs,
    /// An input, or a tokenizer, does not exist.
    #[error("{} does not exist; check its spelling (relative paths start at the current folder)", path.display())]
    Missing {
        /// The path as given.
        path: PathBuf,
    },
    /// The folder that should hold prepared data does not exist.
    #[error(
        "data.path names {}, which does not exist; make it with `kiln data prepare --input <text> \
         --vocab-size <N> --out {}`, or correct data.path",
        path.display(), path.display()
    )]
    NoFolder {
        /// The folder.
        path: PathBuf,
    },
    /// A `builtin:` name that is not known.
    #[error("there is no built-in text {name:?}; use one of: {known}")]
    UnknownBuiltin {
        /// The name as given.
        name: String,
        /// The names that exist.
        known: String,
    },
    /// A file that was given by name does not hold UTF-8 text.
    #[error("{} is not UTF-8 text: {problem}; convert the file or leave it out", path.display())]
    NotText {
        /// The file.
        path: PathBuf,
        /// Where and why.
        problem: String,
    },
    /// A line of a `.jsonl` file could not be used.
    #[error(
        "{}, line {line}: {problem}; every line must be an object such as {{\"text\": \"...\"}}",
        path.display()
    )]
    JsonLine {
        /// The file.
        path: PathBuf,
        /// Line number, from 1.
        line: u64,
        /// What is wrong with the line.
        problem: String,
    },
    /// A `.parquet` file was met by a build that cannot read it.
    #[error(
        "{} is a Parquet file, which this build cannot read; rebuild with `--features parquet`",
        path.display()
    )]
    ParquetDisabled {
        /// The file.
        path: PathBuf,
    },
    /// A `.parquet` file could not be read.
    #[error(
        "cannot read {} as Parquet: {problem}; it needs a string column named `text`, stored \
         plain or compressed with Snappy or gzip",
        path.display()
    )]
    Parquet {
        /// The file.
        path: PathBuf,
        /// What the reader reported.
        problem: String,
    },
    /// A folder could not be walked.
    #[error(
        "cannot list the files of {}: {problem}; check that you may read the folder",
        path.display()
    )]
    Walk {
        /// The input folder.
        path: PathBuf,
        /// What the system reported.
        problem: String,
    },
    /// The inputs hold no text at all.
    #[error(
        "the inputs hold no text ({files} {} found, {skipped} of them not UTF-8); hidden and \
         ignored files and folders named `target` are not read",
        if *files == 1 { "file" } else { "files" }
    )]
    NoText {
        /// Files found.
        files: usize,
        /// Files passed over because they are not UTF-8 text.
        skipped: u64,
    },
    /// Nothing came from any of the inputs.
    #[error("no text came from {}; see that whatever writes it succeeds", joined(inputs))]
    EmptyInputs {
        /// The inputs.
        inputs: Vec<PathBuf>,
    },
    /// There is too little text to have both a training and a validation split.
    #[error(
        "the inputs hold only {bytes} bytes of text, too few to split into training and \
         validation; add more text"
    )]
    TooLittleText {
        /// Bytes of text found.
        bytes: u64,
    },
    /// The validation share is out of range.
    #[error("the validation fraction is {fraction}; it must be above 0 and below 1, such as 0.05")]
    ValidationFraction {
        /// The value as given.
        fraction: f64,
    },
    /// The vocabulary asked for cannot hold every byte.
    #[error(
        "a vocabulary of {requested} tokens is too small; it needs at least {minimum}: one for \
         each of the 256 bytes and one for the end of text"
    )]
    VocabularyTooSmall {
        /// The size as given.
        requested: usize,
        /// The least size possible.
        minimum: usize,
    },
    /// The vocabulary is larger than token ids can express.
    #[error("a vocabulary of {requested} tokens is too large; the most is {maximum}")]
    VocabularyTooLarge {
        /// The size at fault.
        requested: usize,
        /// The largest size possible.
        maximum: usize,
    },
    /// Training a tokenizer failed.
    #[error("training the tokenizer failed: {problem}; check the input text")]
    TokenizerTraining {
        /// What the tokenizer library reported.
        problem: String,
    },
    /// A tokenizer file could not be used.
    #[error(
        "{} is not a usable tokenizer: {problem}; give a tokenizer.json in the format of the \
         `tokenizers` library",
        path.display()
    )]
    TokenizerFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The tokenizer has no end-of-text token.
    #[error("the tokenizer has no end-of-text token; add one of: {known}")]
    NoEndOfText {
        /// The spellings looked for.
        known: String,
    },
    /// Text could not be turned into tokens.
    #[error("the tokenizer could not encode a text: {problem}; use a byte-level tokenizer")]
    Encode {
        /// What the tokenizer library reported.
        problem: String,
    },
    /// Tokens could not be turned into text.
    #[error(
        "the tokenizer could not decode tokens: {problem}; check that the tokenizer belongs to \
         the data"
    )]
    Decode {
        /// What the tokenizer library reported.
        problem: String,
    },
    /// The output folder already holds prepared data.
    #[error("{} already holds prepared data; remove it or choose another folder", path.display())]
    AlreadyPrepared {
        /// The output folder.
        path: PathBuf,
    },
    /// A folder was prepared from something else than is asked for now.
    #[error(
        "{} was prepared from something else than data.text and its options say now:\n  {}\n\
         To use it as it is, leave out data.text: --set data.text=[]\n\
         To prepare again beside it, name a new folder: --set data.path={}-2\n\
         To prepare again in its place, remove {} first",
        path.display(), differences.join("\n  "), path.display(), path.display()
    )]
    PreparedFromOther {
        /// The folder.
        path: PathBuf,
        /// A line for each difference.
        differences: Vec<String>,
    },
    /// The output path cannot be used for a new folder.
    #[error("cannot prepare data in {}: {problem}; choose another folder", path.display())]
    Output {
        /// The output path.
        path: PathBuf,
        /// Why not.
        problem: String,
    },
    /// A folder is not prepared data, or not all of it.
    #[error(
        "{} has no {file}, so it is not a folder of prepared data; run `kiln data prepare` or check \
         the path",
        folder.display()
    )]
    NotPrepared {
        /// The folder.
        folder: PathBuf,
        /// The file it lacks.
        file: &'static str,
    },
    /// `data.json` could not be understood.
    #[error("{}: {problem}; correct the file or run `kiln data prepare` again", path.display())]
    Info {
        /// The `data.json` file.
        path: PathBuf,
        /// The key or line at fault and why.
        problem: String,
    },
    /// `data.json` has another format version.
    #[error(
        "{}: `format_version` is {found}, and this build reads {supported}; run `kiln data prepare` \
         again",
        path.display()
    )]
    Version {
        /// The `data.json` file.
        path: PathBuf,
        /// The version in the file.
        found: u64,
        /// The version this build reads.
        supported: u64,
    },
    /// A token file has not the size that `data.json` states.
    #[error(
        "{} has {actual} bytes, but data.json states {tokens} tokens, which take {expected} \
         bytes; copy the file again or run `kiln data prepare` again",
        path.display()
    )]
    FileSize {
        /// The token file.
        path: PathBuf,
        /// Tokens stated by `data.json`.
        tokens: u64,
        /// Bytes those tokens take.
        expected: u64,
        /// Bytes of the file.
        actual: u64,
    },
    /// A token file holds less than one sample.
    #[error(
        "{} has {tokens} tokens, and one sample with data.seq_len = {seq_len} needs {}; prepare \
         more text or lower data.seq_len",
        path.display(), seq_len.saturating_add(1)
    )]
    TooFewTokens {
        /// The token file.
        path: PathBuf,
        /// Tokens in the file.
        tokens: u64,
        /// The sequence length asked for.
        seq_len: u64,
    },
    /// The sequence length is zero.
    #[error("the sequence length is 0; it must be at least 1")]
    ZeroSequenceLength,
    /// A sample order over no samples.
    #[error("there are no samples to order; prepare more text or shorten the sequence length")]
    NoSamples,
    /// A sample past the end of the file.
    #[error(
        "{} has {samples} samples, so there is no sample {sample}; the last one is {}",
        path.display(), samples - 1
    )]
    SampleOutOfRange {
        /// The token file.
        path: PathBuf,
        /// The sample asked for.
        sample: u64,
        /// Samples in the file.
        samples: u64,
    },
    /// A token file was truncated after it had been opened.
    #[error(
        "{} became shorter while it was in use: it had {expected} bytes and has {actual} now, so \
         sample {sample} cannot be read; something else writes to the file. Put it back, or run \
         `kiln data prepare` again",
        path.display()
    )]
    Truncated {
        /// The token file.
        path: PathBuf,
        /// The sample that was to be read.
        sample: u64,
        /// Bytes of the file when it was opened.
        expected: u64,
        /// Bytes of the file now.
        actual: u64,
    },
    /// A token id outside the vocabulary.
    #[error(
        "{}: token {position} is {id}, outside the vocabulary of {vocab_size}; the file does not \
         belong to its data.json: run `kiln data prepare` again",
        path.display()
    )]
    TokenOutOfRange {
        /// The token file.
        path: PathBuf,
        /// Position of the token in the file, from 0.
        position: u64,
        /// The id found.
        id: u32,
        /// The vocabulary stated by `data.json`.
        vocab_size: usize,
    },
    /// Tokens do not agree with their checksum.
    #[error(
        "tokens {first} to {last} of {} do not agree with their checksum: one of the two has changed since \
         they were prepared. `kiln data verify {}` says what else has; copy the folder again or run `kiln \
         data prepare` again",
        path.display(), parent_of(path).display()
    )]
    ChangedTokens {
        /// The token file.
        path: PathBuf,
        /// The first token of the block that has changed.
        first: u64,
        /// Its last token.
        last: u64,
    },
    /// The checksums of the blocks of a token file cannot be used.
    #[error(
        "{}: {problem}, so the tokens beside it cannot be checked; copy the folder again or run `kiln \
         data prepare` again",
        path.display()
    )]
    BlockSums {
        /// The file of checksums.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// A folder is not as it was prepared.
    #[error(
        "{} is damaged:{}\nCopy the folder again or run `kiln data prepare` again",
        folder.display(),
        problems.iter().map(|problem| format!("\n  - {problem}")).collect::<String>()
    )]
    Damaged {
        /// The folder.
        folder: PathBuf,
        /// What is wrong, file by file.
        problems: Vec<String>,
    },
    /// The operating system refused a file operation.
    #[error("cannot {action} {}: {source}; {}", path.display(), files::advice(source))]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What the system reported.
        source: io::Error,
    },
}

impl DataError {
    /// Whether arguments or configuration name something that is not there or cannot be, rather
    /// than a file being damaged.
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
                | Self::AlreadyPrepared { .. }
                | Self::PreparedFromOther { .. }
                | Self::Output { .. }
                | Self::TooFewTokens { .. }
        )
    }

    /// A closure for `map_err` that says what was tried on which path.
    pub(super) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Io { action, path, source }
    }
}

fn joined(paths: &[PathBuf]) -> String {
    let names: Vec<_> = paths.iter().map(|path| path.display().to_string()).collect();
    names.join(", ")
}

/// The folder that a file is in.
fn parent_of(path: &Path) -> &Path {
    path.parent().unwrap_or(path)
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
