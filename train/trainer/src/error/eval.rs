//! Errors of evaluations.

use std::path::PathBuf;

/// Reasons why an evaluation cannot run.
#[derive(Debug, thiserror::Error)]
pub enum EvalError {
    /// The model does not record which data it was trained on.
    #[error(
        "{} does not record its training data: name a folder of prepared data with --data",
        .checkpoint.display()
    )]
    NoData { checkpoint: PathBuf },
    /// The data that a model was trained on no longer exist at `data`.
    #[error(
        "{} was trained on the data in {}, which does not exist: name a folder of prepared data with --data",
        .checkpoint.display(), .data.display()
    )]
    DataGone { checkpoint: PathBuf, data: PathBuf },
    /// The relative path `data` of the model's training data does not exist.
    #[error(
        "{} was trained on the data in {}, a relative path that exists neither below the current folder nor \
         below a folder that contains the model. Run the command where the training was started, or name a \
         folder of prepared data with --data",
        .checkpoint.display(), .data.display()
    )]
    DataNotFound { checkpoint: PathBuf, data: PathBuf },
    /// The data that a model was trained on, in the folder `data`, have been replaced.
    #[error(
        "the data in {} differ from those that {} was trained on; to use them anyway, pass --data {}",
        .data.display(), .checkpoint.display(), .data.display()
    )]
    OtherData { checkpoint: PathBuf, data: PathBuf },
    /// The data that the user named do not exist.
    #[error("--data {}: no such folder; name one with prepared data", .data.display())]
    DataMissing { data: PathBuf },
    /// The data's `tokens` ids are more than the model's `known` ids, so they come from a different vocabulary.
    #[error(
        "{} has {tokens} token ids, and the model knows {known}: use data prepared with the model's \
         tokenizer",
        .data.display()
    )]
    OtherVocabulary { data: PathBuf, tokens: usize, known: usize },
    /// The data's tokenizer `data` differs from the model's tokenizer `model`.
    #[error(
        "{} is not the same tokenizer as {}, which the model was trained with: use data prepared with the \
         model's tokenizer",
        .data.display(), .model.display()
    )]
    OtherTokenizer { data: PathBuf, model: PathBuf },
    /// The sequence `what`, a flag or prompt, is longer than the model's context.
    #[error(
        "{what}: {tokens} tokens are more than the {context} that the model reads; use fewer, or a model \
         with a longer context"
    )]
    TooLong { what: String, tokens: usize, context: usize },
    /// The validation data are shorter than one sequence.
    #[error(
        "{} has {tokens} validation tokens, and a sequence of --seq-len {seq_len} needs {}: lower --seq-len, or \
         prepare more text",
        .data.display(), .seq_len.saturating_add(1)
    )]
    TooFewTokens { data: PathBuf, tokens: u64, seq_len: usize },
    /// All targets of the validation data are masked.
    #[error(
        "the first {samples} validation samples have no target with a weight: raise eval.samples, or weigh targets"
    )]
    NoTargets { samples: u64 },
    /// A prompt and its answer are longer than the model's context.
    #[error(
        "{place}: the prompt has {prompt} tokens and the answer {answer}, and the model reads at most \
         {context} before the last one: shorten them, or train with a longer data.seq_len"
    )]
    PairTooLong { place: String, prompt: usize, answer: usize, context: usize },
    /// An answer has no tokens.
    #[error("{place}: the answer is empty, so it has no loss: write an answer")]
    EmptyAnswer { place: String },
    /// A line of a file of prompts is not what the command expects.
    #[error("{}, line {line}: {problem}; every line must be {expected}", .path.display())]
    Line { path: PathBuf, line: usize, problem: String, expected: &'static str },
    /// A file of prompts has no lines, or only blank ones.
    #[error("{} has no lines: write {expected} on each line", .path.display())]
    NoLines { path: PathBuf, expected: &'static str },
    /// The token at `position`, from 1, is outside the vocabulary of `known` tokens, of which there is at least one.
    #[error("--tokens: {id} (number {position}) is not a token of the model, whose ids are 0 to {}", .known - 1)]
    UnknownToken { id: u32, position: usize, known: usize },
    /// A file cannot be read.
    #[error("cannot read {}: {source}; check the path", .path.display())]
    Read { path: PathBuf, source: std::io::Error },
    /// A file cannot be written.
    #[error("cannot write {}: {source}; choose another path", .path.display())]
    Write { path: PathBuf, source: std::io::Error },
}

impl EvalError {
    /// Returns whether the user's arguments or files caused this error.
    pub fn is_usage(&self) -> bool {
        !matches!(self, EvalError::Write { .. })
    }
}
