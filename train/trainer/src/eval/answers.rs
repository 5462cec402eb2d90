//! Loss on answers: how likely a model finds a given continuation of a prompt.
//! Prompt and answer are split as in lm-evaluation-harness. The end-of-text token replaces a prompt without tokens.

use std::path::Path;

use burn::tensor::Device;
use kiln_model::{Context, decoder};
use serde::{Deserialize, Serialize};

use crate::error::EvalError;
use crate::error::Result;
use crate::lines;
use kiln_checkpoint::sharded::ShardedDecoder;
use kiln_config::device;
use kiln_data::Tokenizer;

/// Target id that excludes a position from the loss.
const IGNORED: i32 = -1;

/// A prompt, and the answer whose loss is computed.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(expecting = "an object")]
pub struct Pair {
    /// The text that the model is given.
    pub prompt: String,
    /// The expected continuation.
    pub answer: String,
}

/// A tokenized pair. Targets that belong to the prompt are -1, which excludes them from the loss.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenPair {
    inputs: Vec<i32>,
    targets: Vec<i32>,
    answer: usize,
}

/// A model's loss on one answer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AnswerLoss {
    /// Sum of `-log p(token | prompt, answer so far)` over the answer's tokens, in nats.
    pub sum: f64,
    /// Number of tokens of the answer; at least 1.
    pub tokens: usize,
}

impl AnswerLoss {
    /// Returns the loss in nats per token.
    pub fn loss(&self) -> f64 {
        self.sum / self.tokens as f64
    }
}

/// Returns the loss in nats per token over all tokens of all answers; NaN if there are none.
pub fn mean_answer_loss(losses: &[AnswerLoss]) -> f64 {
    let sum: f64 = losses.iter().map(|loss| loss.sum).sum();
    let tokens: usize = losses.iter().map(|loss| loss.tokens).sum();
    sum / tokens as f64
}

/// Reads a file of pairs, one JSON object per line, with line numbers from 1. Skips blank lines.
///
/// # Errors
///
/// If the file cannot be read, has no pair, or has a line that is not a pair.
pub fn read_pairs(path: &Path) -> Result<Vec<(usize, Pair)>, EvalError> {
    lines::read_json(path, "an object with the strings \"prompt\" and \"answer\"")
}

impl TokenPair {
    /// Tokenizes `pair` for a model that reads `context` tokens at a time; errors name its source, `place`.
    ///
    /// # Errors
    ///
    /// If the answer has no tokens, or if prompt and answer together are longer than the model's context.
    pub fn new(pair: &Pair, context: usize, tokenizer: &Tokenizer, place: &str) -> Result<Self> {
        let (mut prompt, answer) = tokenizer.encode_pair(&pair.prompt, &pair.answer)?;
        if answer.is_empty() {
            return Err(EvalError::EmptyAnswer { place: place.to_owned() }.into());
        }
        if prompt.is_empty() {
            prompt.push(tokenizer.end_of_text()?);
        }
        if prompt.len() + answer.len() - 1 > context {
            let place = place.to_owned();
            let (prompt, answer) = (prompt.len(), answer.len());
            return Err(EvalError::PairTooLong { place, prompt, answer, context }.into());
        }
        let all: Vec<_> = prompt.iter().chain(&answer).map(|id| *id as i32).collect();
        let mut targets = all[1..].to_vec();
        targets[..prompt.len() - 1].fill(IGNORED);
        let inputs = all[..all.len() - 1].to_vec();
        Ok(TokenPair { inputs, targets, answer: answer.len() })
    }

    /// Tokenizes the `pairs` of the file at `path`, each with its line number, as [`TokenPair::new`] does.
    pub fn from_file(
        path: &Path,
        pairs: &[(usize, Pair)],
        context: usize,
        tokenizer: &Tokenizer,
    ) -> Result<Vec<Self>> {
        let place = |line: &usize| format!("{}, line {line}", path.display());
        pairs.iter().map(|(line, pair)| TokenPair::new(pair, context, tokenizer, &place(line))).collect()
    }
}

/// Returns the losses of all pairs, in order, the same on every rank. Collective.
/// Every pass takes one pair per rank. A rank without a pair computes a pass whose result is ignored.
pub fn answer_losses(
    model: &ShardedDecoder,
    device: &Device,
    pairs: &[TokenPair],
) -> Result<Vec<AnswerLoss>> {
    let whole = answer_losses_while(model, device, pairs, || Ok(true))?;
    Ok(whole.unwrap_or_else(|| unreachable!("invariant: it is not told to end early")))
}

/// Like [`answer_losses`], but returns `None` if `go_on` returns false after a pass that is not the last.
/// `go_on` must return the same value on all ranks.
pub fn answer_losses_while(
    model: &ShardedDecoder,
    device: &Device,
    pairs: &[TokenPair],
    mut go_on: impl FnMut() -> Result<bool>,
) -> Result<Option<Vec<AnswerLoss>>> {
    let engine = model.engine();
    let (rank, ranks) = (engine.world().rank(), engine.world().world_size());
    let nothing = TokenPair { inputs: vec![0], targets: vec![IGNORED], answer: 0 };
    let mut sums = vec![0.0; pairs.len()];
    let passes = pairs.len().div_ceil(ranks);
    for pass in 0..passes {
        let index = pass * ranks + rank;
        let TokenPair { inputs, targets, .. } = pairs.get(index).unwrap_or(&nothing);
        let length = inputs.len();
        let inputs = device::tokens(inputs.clone(), 1, length, device);
        let targets = device::tokens(targets.clone(), 1, length, device);
        let context = Context::evaluation();
        let loss = decoder::loss(&model.pass(device), inputs, targets, 1.0, &context);
        engine.check()?;
        if let Some(sum) = sums.get_mut(index) {
            *sum = f64::from(loss.into_scalar::<f32>());
        }
        if !go_on()? && pass + 1 < passes {
            engine.finish_evaluation()?;
            return Ok(None);
        }
    }
    engine.finish_evaluation()?;
    let sums = engine.sum_over_ranks("answers", &sums)?;
    let losses = sums.into_iter().zip(pairs);
    Ok(Some(losses.map(|(sum, pair)| AnswerLoss { sum, tokens: pair.answer }).collect()))
}
