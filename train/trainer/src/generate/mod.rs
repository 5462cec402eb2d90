//! Text generation with a trained model: [`Continuation`] caches keys and values, [`Sampling`] chooses tokens.
//! Under sharding, all ranks see the same logits and therefore choose the same tokens.

mod continuation;

use burn::tensor::Device;
pub use kiln_model::Sampling;
use kiln_model::decoder::Modules;
use kiln_shard::ShardError;

pub use continuation::Continuation;

use crate::error::{EvalError, Result};
use kiln_data::Tokenizer;

/// Continues `prompt`, and returns prompt and continuation. `after_pass` is called after every forward pass.
pub fn text<P: Modules>(
    modules: &P,
    device: &Device,
    tokenizer: &Tokenizer,
    prompt: &str,
    sampling: &Sampling,
    mut after_pass: impl FnMut() -> Result<(), ShardError>,
) -> Result<String> {
    let mut continuation = Continuation::new(tokenizer, prompt, sampling)?;
    while continuation.advance(modules, device, &mut after_pass)? {}
    Ok(continuation.text()?)
}

/// Fails if `prompt` has more than `context` tokens or cannot be tokenized; the error calls it `what`.
pub fn check_prompt(what: &'static str, prompt: &str, tokenizer: &Tokenizer, context: usize) -> Result<()> {
    let (_, ids) = tokenizer.encode_prompt(prompt)?;
    match ids.len() > context {
        true => Err(EvalError::TooLong { what, tokens: ids.len(), context }.into()),
        false => Ok(()),
    }
}
