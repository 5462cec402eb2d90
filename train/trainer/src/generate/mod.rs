//! Text generation with a trained model: a [`Batch`] of [`Continuation`]s caches keys and values, [`Sampling`] chooses
//! tokens. Under sharding, all ranks see the same logits and therefore choose the same tokens.

mod batch;
mod continuation;
mod stream;

use std::collections::BTreeMap;

use burn::tensor::Device;
pub use kiln_model::Sampling;
use kiln_model::decoder::Modules;
use kiln_shard::ShardError;

pub use batch::Batch;
pub use continuation::{Continuation, End};

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
    let mut batch = Batch::new(vec![Continuation::new(tokenizer, prompt, sampling)?]);
    while batch.advance(modules, device, &mut after_pass)? {}
    Ok(batch.texts()[0].text()?)
}

/// Numbers of texts that [`texts`] generates.
#[derive(Clone, Copy, Debug)]
pub struct Counts {
    /// Texts for each prompt.
    pub samples: usize,
    /// Maximum number of texts in a batch. Must be at least 1.
    pub rows: usize,
}

/// Generates texts for each of `prompts`, in batches of prompts with equal numbers of tokens. Calls `done` with each
/// text that has ended, and with the indices of its prompt and sample, in the order of prompts and samples.
///
/// The choices of a text depend only on the key of its prompt's continuation and on the index of the sample. `after_pass` and `agree`
/// are as in [`Batch::advance_together`].
pub fn texts<'a, P: Modules>(
    modules: &P,
    device: &Device,
    prompts: &[Continuation<'a>],
    counts: Counts,
    mut after_pass: impl FnMut() -> Result<(), ShardError>,
    mut agree: impl FnMut(Vec<f64>) -> Result<Vec<f64>, ShardError>,
    mut done: impl FnMut(usize, usize, &Continuation<'a>) -> Result<()>,
) -> Result<()> {
    let mut by_length: BTreeMap<usize, Vec<(usize, usize)>> = BTreeMap::new();
    for (index, prompt) in prompts.iter().enumerate() {
        let group = by_length.entry(prompt.all_ids().len()).or_default();
        group.extend((0..counts.samples).map(|sample| (index, sample)));
    }
    // Texts that have ended before one in front of them.
    let mut waiting = BTreeMap::new();
    let mut next = (0, 0);
    for places in by_length.values().flat_map(|group| group.chunks(counts.rows)) {
        let start = |(prompt, sample): &(usize, usize)| sample_of(&prompts[*prompt], *sample);
        let mut batch = Batch::new(places.iter().map(start).collect());
        while batch.advance_together(modules, device, &mut after_pass, &mut agree)? {}
        waiting.extend(places.iter().copied().zip(batch.into_texts()));
        while let Some(text) = waiting.remove(&next) {
            let (prompt, sample) = next;
            done(prompt, sample, &text)?;
            next = if sample + 1 < counts.samples { (prompt, sample + 1) } else { (prompt + 1, 0) };
        }
    }
    Ok(())
}

/// Returns the start of a sample of `prompt`, with its own key.
pub fn sample_of<'a>(prompt: &Continuation<'a>, sample: usize) -> Continuation<'a> {
    prompt.clone().with_key(prompt.key().fork_index(sample as u64))
}

/// Fails if `prompt` has more than `context` tokens or cannot be tokenized; the error calls it `what`.
pub fn check_prompt(what: &str, prompt: &str, tokenizer: &Tokenizer, context: usize) -> Result<()> {
    let (_, ids) = tokenizer.encode_prompt(prompt)?;
    match ids.len() > context {
        true => Err(EvalError::TooLong { what: what.to_owned(), tokens: ids.len(), context }.into()),
        false => Ok(()),
    }
}
