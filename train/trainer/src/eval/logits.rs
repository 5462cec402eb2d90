//! Logits of a sequence, and the `.npy` file they are written to.

use std::io;
use std::path::Path;

use burn::tensor::Device;
use kiln_model::decoder;

use crate::error::EvalError;
use crate::error::Result;
use kiln_checkpoint::sharded::ShardedDecoder;
use kiln_checkpoint::source::ModelSource;
use kiln_config::device;
use kiln_sys::npy;

/// Logits of every position: `[seq, vocab_size]`, row by row.
#[derive(Clone, Debug, PartialEq)]
pub struct Logits {
    /// Number of positions, and size of the vocabulary.
    pub shape: [usize; 2],
    /// The logits, row by row.
    pub values: Vec<f32>,
}

/// Converts `tokens` for `model`. Fails unless all are in its vocabulary and together fit into its context.
pub fn check_tokens(model: &ModelSource, tokens: &[u32]) -> Result<Vec<i32>, EvalError> {
    let (known, context) = (model.model().vocab_size, model.context_length());
    if tokens.len() > context {
        return Err(EvalError::TooLong { what: "--tokens".to_owned(), tokens: tokens.len(), context });
    }
    let outside = tokens.iter().position(|id| *id as usize >= known);
    match outside {
        Some(index) => Err(EvalError::UnknownToken { id: tokens[index], position: index + 1, known }),
        None => Ok(tokens.iter().map(|id| *id as i32).collect()),
    }
}

/// Returns the logits of `model` after each of `tokens`, the same on every rank. Collective.
pub fn logits(model: &ShardedDecoder, device: &Device, tokens: &[i32]) -> Result<Logits> {
    let tokens = device::tokens(tokens.to_vec(), 1, tokens.len(), device);
    let logits = decoder::logits(&model.pass(device), tokens);
    model.engine().finish_evaluation()?;
    let [_, seq, vocab_size] = logits.dims();
    let values = logits.into_data().convert::<f32>().try_into_vec();
    let values = values.expect("invariant: values of f32 were asked for");
    Ok(Logits { shape: [seq, vocab_size], values })
}

impl Logits {
    /// Writes a `.npy` file, and fails as [`npy::write`] does.
    pub fn write_npy(&self, path: &Path) -> io::Result<()> {
        npy::write(path, &self.shape, &self.values)
    }
}
