//! Why an evaluation cannot be made.

use std::path::PathBuf;

/// Why an evaluation cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum EvalError {
    /// A model that does not say what it was trained on.
    #[error(
        "{} does not say which data it was trained on: name a folder with prepared data with --data",
        .checkpoint.display()
    )]
    NoData {
        /// The model.
        checkpoint: PathBuf,
    },
    /// The data that a model was trained on is not there.
    #[error(
        "{} was trained on the data in {}, which is not there: name a folder with prepared data with --data",
        .checkpoint.display(), .data.display()
    )]
    DataGone {
        /// The model.
        checkpoint: PathBuf,
        /// Where its data was.
        data: PathBuf,
    },
    /// The data that a model was trained on, which a relative path names, is nowhere to be found.
    #[error(
        "{} was trained on the data in {}, a path that starts where the run was started: nothing is there from \
         the current folder, nor from one that the model is in. Start where the run was started, or name a \
         folder with prepared data with --data",
        .checkpoint.display(), .data.display()
    )]
    DataNotFound {
        /// The model.
        checkpoint: PathBuf,
        /// Where its data was.
        data: PathBuf,
    },
    /// In the place of the data that a model was trained on are others.
    #[error(
        "the data in {} are not those that {} was trained on; if they are meant, say so with --data {}",
        .data.display(), .checkpoint.display(), .data.display()
    )]
    OtherData {
        /// The model.
        checkpoint: PathBuf,
        /// What is there.
        data: PathBuf,
    },
    /// Data that is not where the user says.
    #[error("--data {}: there is no such folder; name one with prepared data", .data.display())]
    DataMissing {
        /// Where it was looked for.
        data: PathBuf,
    },
    /// Data of another tokenizer.
    #[error(
        "{} has {tokens} token ids, and the model knows {known}: name data that was prepared with the model's tokenizer",
        .data.display()
    )]
    OtherVocabulary {
        /// The folder with prepared data.
        data: PathBuf,
        /// Token ids of the data.
        tokens: usize,
        /// Token ids of the model.
        known: usize,
    },
    /// Data of another tokenizer, whose ids the model would take for other text.
    #[error(
        "{} is another tokenizer than {}, which the model was trained with: name data that was prepared with the model's tokenizer",
        .data.display(), .model.display()
    )]
    OtherTokenizer {
        /// The tokenizer of the data.
        data: PathBuf,
        /// The tokenizer of the model.
        model: PathBuf,
    },
    /// Sequences that are longer than the model can take.
    #[error(
        "{what}: {tokens} tokens are more than the {context} that the model reads; use fewer, or a model with a longer context"
    )]
    TooLong {
        /// What is too long.
        what: &'static str,
        /// Its tokens.
        tokens: usize,
        /// The model's context.
        context: usize,
    },
    /// A prompt and its answer that are longer than the model can take.
    #[error(
        "{place}: the prompt has {prompt} tokens and the answer {answer}, and the model reads at most {context} before the last one: shorten them"
    )]
    PairTooLong {
        /// Where the pair comes from.
        place: String,
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens of the answer.
        answer: usize,
        /// The model's context.
        context: usize,
    },
    /// An answer without a token.
    #[error("{place}: the answer is empty, so there is no loss: give it a text")]
    EmptyAnswer {
        /// Where the pair comes from.
        place: String,
    },
    /// A line of a file of pairs that is none.
    #[error(
        "{}, line {line}: {problem}; every line is an object with the texts \"prompt\" and \"answer\"",
        .path.display()
    )]
    Line {
        /// The file.
        path: PathBuf,
        /// Its line, from 1.
        line: usize,
        /// What is wrong.
        problem: String,
    },
    /// A file of pairs without a pair.
    #[error("{} has no pairs: write one object with \"prompt\" and \"answer\" per line", .path.display())]
    NoPairs {
        /// The file.
        path: PathBuf,
    },
    /// A token that the model does not know.
    #[error("--tokens: {id} (number {position}) is no token of the model, which knows 0 to {}", .known - 1)]
    UnknownToken {
        /// The token.
        id: u32,
        /// Its place in the list, from 1.
        position: usize,
        /// Token ids of the model; at least 1.
        known: usize,
    },
    /// A file that cannot be read.
    #[error("cannot read {}: {source}; check the path", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file that cannot be written.
    #[error("cannot write {}: {source}; choose another path", .path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
}

impl EvalError {
    /// Whether the user's arguments or files are the cause.
    pub fn is_usage(&self) -> bool {
        !matches!(self, EvalError::Write { .. })
    }
}
