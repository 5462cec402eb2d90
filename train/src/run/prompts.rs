//! The prompts of a configuration: found and tokenized before a run starts.

use crate::config::Config;
use crate::data::{self, Tokenizer};
use crate::error::Result;
use crate::eval::{EvalError, Pair, TokenPair, read_pairs};

/// The pairs of `eval.prompts` with their lines; none if it names no file. Before anything that takes long.
pub(crate) fn read(config: &Config) -> Result<Vec<(usize, Pair)>, EvalError> {
    config.eval.prompts.as_deref().map_or_else(|| Ok(Vec::new()), read_pairs)
}

/// The tokens of `pairs`, which [`read`] has found.
///
/// # Errors
///
/// When a pair is longer than `data.seq_len` or has an empty answer, and when `tokenizer`, the content of the
/// tokenizer's file, cannot express a prompt of `[sample]`.
pub(crate) fn tokenize(config: &Config, pairs: &[(usize, Pair)], tokenizer: &[u8]) -> Result<Vec<TokenPair>> {
    let Config { data, eval, sample, .. } = config;
    if eval.prompts.is_none() && sample.all_prompts().next().is_none() {
        return Ok(Vec::new());
    }
    let tokenizer = Tokenizer::from_file(tokenizer.to_vec(), &data::tokenizer_of(&data.path)?)?;
    for prompt in sample.all_prompts() {
        tokenizer.encode(prompt)?;
        // A text ends with it, and one without a prompt starts after it.
        tokenizer.end_of_text()?;
    }
    match &eval.prompts {
        Some(path) => TokenPair::of_file(path, pairs, data.seq_len, &tokenizer),
        None => Ok(Vec::new()),
    }
}
