//! Text from a trained model.

use std::path::Path;

use burn::tensor::Device;
use kiln_model::Key;
use kiln_model::decoder::{self, Decoder, Parts};
use kiln_shard::ranks::run_ranks;
use kiln_shard::{EngineBuilder, Policy, ShardError, Strategy};

use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::config::ConfigError;
use crate::data::Tokenizer;
use crate::device;
use crate::sharded::ShardedDecoder;
use crate::train::TrainError;

/// How tokens are chosen.
#[derive(Clone, Copy, Debug)]
pub struct Sampling {
    /// Tokens to generate, unless the text ends before.
    pub max_tokens: usize,
    /// 0 takes the likeliest token; higher is more random.
    pub temperature: f64,
    /// Names the random choices.
    pub key: Key,
    /// The model reads at most this many of the last tokens.
    pub context_length: usize,
}

/// Continues `prompt` and returns the prompt with its continuation. `after_pass` is called after
/// every forward pass.
pub fn text<P: Parts>(
    parts: &P,
    device: &Device,
    tokenizer: &Path,
    prompt: &str,
    sampling: &Sampling,
    mut after_pass: impl FnMut() -> Result<(), ShardError>,
) -> Result<String, TrainError> {
    let tokenizer = Tokenizer::load(tokenizer)?;
    let end = tokenizer.end_of_text()?;
    let mut ids = tokenizer.encode(prompt)?;
    if ids.is_empty() {
        // Nothing to go on from: start as a document starts, after the end of another.
        ids.push(end);
    }
    let prompt_length = ids.len();
    for counter in 0..sampling.max_tokens as u64 {
        let window = &ids[ids.len().saturating_sub(sampling.context_length.max(1))..];
        let window: Vec<i32> = window.iter().map(|id| *id as i32).collect();
        let length = window.len();
        let tokens = device::tokens(window, 1, length, device);
        let logits = decoder::logits(parts, tokens);
        after_pass()?;
        let [_, _, vocab_size] = logits.dims();
        let last = logits.narrow(1, length - 1, 1).into_data().convert::<f32>();
        let scores = last.as_slice::<f32>().unwrap_or_default();
        let known = vocab_size.min(tokenizer.vocab_size());
        let next = choose(&scores[..known.min(scores.len())], sampling, counter);
        if next == end {
            break;
        }
        ids.push(next);
    }
    let shown = if prompt.is_empty() { &ids[prompt_length..] } else { &ids[..] };
    Ok(tokenizer.decode(shown)?)
}

/// Draws from `softmax(scores / temperature)`.
fn choose(scores: &[f32], sampling: &Sampling, counter: u64) -> u32 {
    let best = (0..scores.len()).fold(0, |best, i| if scores[i] > scores[best] { i } else { best });
    if sampling.temperature <= 0.0 || scores.is_empty() {
        return best as u32;
    }
    let weight = |score: f32| (f64::from(score - scores[best]) / sampling.temperature).exp();
    let total: f64 = scores.iter().map(|score| weight(*score)).sum();
    let mut left = sampling.key.uniform(counter) * total;
    for (id, score) in scores.iter().enumerate() {
        left -= weight(*score);
        if left < 0.0 {
            return id as u32;
        }
    }
    best as u32
}

/// Continues `prompt` with the model of a checkpoint, on one rank.
pub fn from_checkpoint(
    path: &Path,
    prompt: &str,
    max_tokens: usize,
    temperature: f64,
    seed: u64,
) -> Result<String, TrainError> {
    if !(temperature >= 0.0 && temperature.is_finite()) {
        let problem = format!("--temperature = {temperature}: must be zero or more, and finite");
        return Err(ConfigError::Invalid { problems: vec![problem] }.into());
    }
    let checkpoint = Checkpoint::open(path)?;
    let (path, model) = (checkpoint.tokenizer(), &checkpoint.state().model);
    let tokens = Tokenizer::load(&path)?.vocab_size();
    if tokens > model.vocab_size {
        let problem = format!("it has {tokens} tokens, and the model knows {}", model.vocab_size);
        return Err(CheckpointError::Damaged { path, problem }.into());
    }
    let context_length = read_context_length(&checkpoint);
    let threads = device::threads_per_rank(&Default::default(), 1);
    let mut texts = run_ranks(1, threads, |world| {
        let plain = device::plain();
        let policy = Policy { strategy: Strategy::NoShard, ..Policy::default() };
        let decoder = Decoder::new(&checkpoint.state().model, Key::new(0), &plain);
        let model = ShardedDecoder::new(decoder, EngineBuilder::new(world, policy, None)?)?;
        checkpoint.load_weights(model.engine())?;
        let sampling = Sampling { max_tokens, temperature, key: Key::new(seed), context_length };
        text(&model.pass(&plain), &plain, &checkpoint.tokenizer(), prompt, &sampling, || {
            model.engine().finish_evaluation()
        })
    })?;
    Ok(texts.swap_remove(0))
}

/// The sequence length that the model was trained with; longer contexts it has never seen.
fn read_context_length(checkpoint: &Checkpoint) -> usize {
    let config = checkpoint.folder().join("config.toml");
    crate::config::load(&config, &[])
        .map_or(crate::config::DataSection::default().seq_len, |config| config.data.seq_len)
}
