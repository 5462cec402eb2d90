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
    NoData { checkpoint: PathBuf },
    /// The data that a model was trained on is not there. `data`: where its data was.
    #[error(
        "{} was trained on the data in {}, which is not there: name a folder with prepared data with --data",
        .checkpoint.display(), .data.display()
    )]
    DataGone { checkpoint: PathBuf, data: PathBuf },
    /// The relative path `data` of what a model was trained on leads nowhere.
    #[error(
        "{} was trained on the data in {}, a path that starts where the run was started: nothing is there \
         from the current folder, nor from one that the model is in. Start where the run was started, or \
         name a folder with prepared data with --data",
        .checkpoint.display(), .data.display()
    )]
    DataNotFound { checkpoint: PathBuf, data: PathBuf },
    /// In the place of the data that a model was trained on are others. `data`: what is there.
    #[error(
        "the data in {} are not those that {} was trained on; if they are meant, say so with --data {}",
        .data.display(), .checkpoint.display(), .data.display()
    )]
    OtherData { checkpoint: PathBuf, data: PathBuf },
    /// Data that is not where the user says.
    #[error("--data {}: there is no such folder; name one with prepared data", .data.display())]
    DataMissing { data: PathBuf },
    /// Data of another tokenizer.
    #[error(
        "{} has {tokens} token ids, and the model knows {known}: name data that was prepared with the model's \
         tokenizer",
        .data.display()
    )]
    OtherVocabulary { data: PathBuf, tokens: usize, known: usize },
    /// Data of another tokenizer, whose ids the model would take for other text. `data`: the tokenizer of the
    /// data; `model`: the tokenizer of the model.
    #[error(
        "{} is another tokenizer than {}, which the model was trained with: name data that was prepared with the \
         model's tokenizer",
        .data.display(), .model.display()
    )]
    OtherTokenizer { data: PathBuf, model: PathBuf },
    /// Sequences that are longer than the model can take. `what`: what is too long.
    #[error(
        "{what}: {tokens} tokens are more than the {context} that the model reads; use fewer, or a model \
         with a longer context"
    )]
    TooLong { what: &'static str, tokens: usize, context: usize },
    /// Validation data that is shorter than one sequence.
    #[error(
        "{} has {tokens} validation tokens, and a sequence of --seq-len {seq_len} needs {}: lower --seq-len, or \
         prepare more text",
        .data.display(), .seq_len.saturating_add(1)
    )]
    TooFewTokens { data: PathBuf, tokens: u64, seq_len: usize },
    /// A prompt and its answer that are longer than the model can take.
    #[error(
        "{place}: the prompt has {prompt} tokens and the answer {answer}, and the model reads at most \
         {context} before the last one: shorten them, or train with a longer data.seq_len"
    )]
    PairTooLong { place: String, prompt: usize, answer: usize, context: usize },
    /// An answer without a token.
    #[error("{place}: the answer is empty, so there is no loss: give it a text")]
    EmptyAnswer { place: String },
    /// A line of a file of pairs that is none.
    #[error(
        "{}, line {line}: {problem}; every line is an object with the texts \"prompt\" and \"answer\"",
        .path.display()
    )]
    Line { path: PathBuf, line: usize, problem: String },
    /// A file of pairs without a pair.
    #[error("{} has no pairs: write one object with \"prompt\" and \"answer\" per line", .path.display())]
    NoPairs { path: PathBuf },
    /// A token that the model does not know. `position`: in the list, from 1; `known`: ids of the model, at
    /// least 1.
    #[error("--tokens: {id} (number {position}) is no token of the model, which knows 0 to {}", .known - 1)]
    UnknownToken { id: u32, position: usize, known: usize },
    /// A file that cannot be read.
    #[error("cannot read {}: {source}; check the path", .path.display())]
    Read { path: PathBuf, source: std::io::Error },
    /// A file that cannot be written.
    #[error("cannot write {}: {source}; choose another path", .path.display())]
    Write { path: PathBuf, source: std::io::Error },
}

impl EvalError {
    /// Whether the user's arguments or files are the cause.
    pub fn is_usage(&self) -> bool {
        !matches!(self, EvalError::Write { .. })
    }
}
