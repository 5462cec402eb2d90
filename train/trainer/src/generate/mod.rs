//! Text generation with a trained model.
//!
//! [`Continuation`] advances token by token with the keys and values of earlier tokens cached, [`Sampling`]
//! defines how each token is chosen, and [`GenerateArgs`] is the command, which shows a text in pieces
//! (`stream`). Under sharding, all ranks continue the same text together: they see the same logits, so they
//! choose the same tokens.

mod command;
mod continuation;
mod stream;

use burn::tensor::Device;
pub use kiln_model::Sampling;
use kiln_model::decoder::Modules;
use kiln_shard::ShardError;

pub use command::GenerateArgs;
pub use command::check_prompt;
pub use continuation::Continuation;

use crate::error::Result;
use kiln_data::Tokenizer;

/// Continues `prompt`, and returns it with its continuation. `after_pass` is called after every forward pass.
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
