//! The prompts of a configuration, read and tokenized before a run starts. They may contain special tokens.

use crate::error::Result;
use crate::eval::{EvalError, Pair, TokenPair, read_pairs};
use crate::generate::check_prompt;
use kiln_config::Config;
use kiln_data::{self as data, Tokenizer};

/// Reads the pairs of `eval.prompts` with their line numbers; returns no pairs if no file is set.
pub fn read(config: &Config) -> Result<Vec<(usize, Pair)>, EvalError> {
    config.eval.prompts.as_deref().map_or_else(|| Ok(Vec::new()), read_pairs)
}

/// Tokenizes `pairs`, which come from [`read`], with the content `tokenizer` of the data's tokenizer file.
///
/// # Errors
///
/// If a pair exceeds `data.seq_len` or its answer is empty, or a prompt of `[sample]` exceeds `context` tokens.
pub fn tokenize(
    config: &Config,
    pairs: &[(usize, Pair)],
    tokenizer: &[u8],
    end_of_text: u32,
    context: usize,
) -> Result<Vec<TokenPair>> {
    let Config { data, eval, sample, .. } = config;
    if eval.prompts.is_none() && sample.all_prompts().next().is_none() {
        return Ok(Vec::new());
    }
    let tokenizer = Tokenizer::from_file(tokenizer.to_vec(), &data::tokenizer_of(&data.path)?)?
        .reading_special_tokens(true)
        .ending_with(Some(end_of_text));
    for prompt in sample.all_prompts() {
        check_prompt("a prompt of [sample]", prompt, &tokenizer, context)?;
    }
    match &eval.prompts {
        Some(path) => TokenPair::from_file(path, pairs, data.seq_len, &tokenizer),
        None => Ok(Vec::new()),
    }
}
