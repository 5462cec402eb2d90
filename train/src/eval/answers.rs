//! Loss on answers: how likely a model finds a given continuation of a prompt.
//!
//! Prompt and answer are tokenized one by one and put together, so that the answer's tokens do not
//! depend on the prompt; a tokenizer might otherwise merge the end of one with the start of the
//! other. A prompt without a token is the end of another document, as in generation.

use std::path::Path;

use burn::tensor::Device;
use kiln_model::{Context, decoder};
use serde::Deserialize;

use super::EvalError;
use crate::data::{Tokenizer, describe_json};
use crate::device;
use crate::error::Result;
use crate::sharded::ShardedDecoder;
use crate::source::ModelSource;

/// Target of a position that does not count.
const IGNORED: i32 = -1;

/// A prompt and the answer that is looked at.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(expecting = "an object")]
pub struct Pair {
    /// What the model is given.
    pub prompt: String,
    /// What it should say.
    pub answer: String,
}

/// A pair as tokens that a model can read: `inputs` and, for each of them, the token that follows,
/// or -1 where that is part of the prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenPair {
    inputs: Vec<i32>,
    targets: Vec<i32>,
    answer: usize,
}

/// What a model makes of one answer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AnswerLoss {
    /// Sum of `-log p(token | prompt, answer so far)` over the answer's tokens, in nats.
    pub sum: f64,
    /// Tokens of the answer; at least 1.
    pub tokens: usize,
}

impl AnswerLoss {
    /// Nats per token.
    pub fn loss(&self) -> f64 {
        self.sum / self.tokens as f64
    }
}

/// Reads a file of pairs, one JSON object per line; blank lines are passed over. Returns every pair
/// with its line, counted from 1.
pub fn read_pairs(path: &Path) -> Result<Vec<(usize, Pair)>, EvalError> {
    let text =
        std::fs::read_to_string(path).map_err(|source| EvalError::Read { path: path.to_owned(), source })?;
    // A byte order mark is no part of the first line.
    let text = text.strip_prefix('\u{FEFF}').unwrap_or(&text);
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let pairs: Vec<_> = lines
        .map(|(index, line)| match serde_json::from_str(line) {
            Ok(pair) => Ok((index + 1, pair)),
            Err(error) => {
                let problem = describe_json(&error);
                Err(EvalError::Line { path: path.to_owned(), line: index + 1, problem })
            }
        })
        .collect::<Result<_, _>>()?;
    if pairs.is_empty() { Err(EvalError::NoPairs { path: path.to_owned() }) } else { Ok(pairs) }
}

impl TokenPair {
    /// Tokenizes `pair` for `model`; `place` says where it comes from.
    ///
    /// # Errors
    ///
    /// When the answer has no token, and when the two are longer than the model's context.
    pub fn new(pair: &Pair, model: &ModelSource, tokenizer: &Tokenizer, place: &str) -> Result<Self> {
        let mut prompt = tokenizer.encode(&pair.prompt)?;
        if prompt.is_empty() {
            prompt.push(tokenizer.end_of_text()?);
        }
        let answer = tokenizer.encode(&pair.answer)?;
        if answer.is_empty() {
            return Err(EvalError::EmptyAnswer { place: place.to_owned() }.into());
        }
        let context = model.context_length();
        // The last token is looked for, but nothing is read after it.
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
}

/// The losses of all pairs, in order, the same on every rank. The pairs are dealt out to the ranks,
/// one per pass; a rank that runs out computes a pair that does not count, so that all ranks make
/// the same number of passes. Collective.
pub fn answer_losses(
    model: &ShardedDecoder,
    device: &Device,
    pairs: &[TokenPair],
) -> Result<Vec<AnswerLoss>> {
    let engine = model.engine();
    let (rank, ranks) = (engine.world().rank(), engine.world().world_size());
    let nothing = TokenPair { inputs: vec![0], targets: vec![IGNORED], answer: 0 };
    let mut sums = vec![0.0; pairs.len()];
    for pass in 0..pairs.len().div_ceil(ranks) {
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
    }
    engine.finish_evaluation()?;
    // All ranks but one add nothing to a pair.
    let sums = engine.sum_over_ranks("answers", &sums)?;
    let losses = sums.into_iter().zip(pairs);
    Ok(losses.map(|(sum, pair)| AnswerLoss { sum, tokens: pair.answer }).collect())
}
