//! Text that a model continues token by token.

use burn::tensor::Device;
use kiln_model::KeyValueCache;
use kiln_model::decoder::{self, Modules};
use kiln_shard::ShardError;

use super::Sampling;
use crate::error::{Result, TrainError};
use kiln_config::device;
use kiln_data::{DataError, Tokenizer};

/// Text being generated: its token ids, and the model's cache of their keys and values.
///
/// After the prompt, a pass reads one token. When the context is full, it rereads the last half from position 0.
pub struct Continuation<'a> {
    tokenizer: &'a Tokenizer,
    sampling: &'a Sampling,
    ends: Vec<u32>,
    ids: Vec<u32>,
    /// Number of leading ids outside the text, which the tokenizer adds or which replace an empty prompt.
    hidden: usize,
    /// Number of leading ids that come from the prompt, including the hidden ones.
    given: usize,
    cache: KeyValueCache,
    /// Number of ids that the model has read, or that were dropped unread because the context is full.
    read: usize,
    chosen: usize,
    ended: bool,
}

impl<'a> Continuation<'a> {
    /// Starts a text with `prompt`.
    ///
    /// # Errors
    ///
    /// If the tokenizer cannot express the prompt, or if neither it nor `sampling` defines an end-of-text token.
    pub fn new(tokenizer: &'a Tokenizer, prompt: &str, sampling: &'a Sampling) -> Result<Self, DataError> {
        let mut ends = sampling.end_ids.clone();
        match tokenizer.end_of_text() {
            Ok(end) => ends.insert(0, end),
            Err(error) if ends.is_empty() => return Err(error),
            Err(_) => {}
        }
        let (mut hidden, mut ids) = tokenizer.encode_prompt(prompt)?;
        if ids.is_empty() {
            // An end-of-text token replaces an empty prompt: after it, the model expects a new document.
            (hidden, ids) = (1, vec![ends[0]]);
        }
        let given = ids.len();
        let positions = given.saturating_add(sampling.max_tokens);
        let cache = KeyValueCache::new(positions.min(sampling.context_length).max(1));
        let (read, chosen, ended) = (0, 0, false);
        Ok(Continuation { tokenizer, sampling, ends, ids, hidden, given, cache, read, chosen, ended })
    }

    /// Chooses the next token. Returns false at the end of the text. Calls `after_pass` before using the logits.
    pub fn advance<P: Modules>(
        &mut self,
        modules: &P,
        device: &Device,
        after_pass: impl FnOnce() -> Result<(), ShardError>,
    ) -> Result<bool> {
        self.advance_together(modules, device, after_pass, Ok)
    }

    /// Like [`Continuation::advance`] on several ranks: `agree` returns one rank's choice on all ranks.
    /// A choice is a token id, or negative if the logits are not finite.
    pub fn advance_together<P: Modules>(
        &mut self,
        modules: &P,
        device: &Device,
        after_pass: impl FnOnce() -> Result<(), ShardError>,
        agree: impl FnOnce(f64) -> Result<f64, ShardError>,
    ) -> Result<bool> {
        if self.ended || self.chosen == self.sampling.max_tokens {
            return Ok(false);
        }
        let new: Vec<i32> = self.unread().iter().map(|id| *id as i32).collect();
        let count = new.len();
        let tokens = device::tokens(new, 1, count, device);
        let Ok(logits) = decoder::next_logits(modules, tokens, &self.cache) else {
            unreachable!("invariant: `unread` returns no more than there is room for")
        };
        self.read = self.ids.len();
        after_pass()?;
        let [_, vocab_size] = logits.dims();
        let data = logits.into_data().convert::<f32>();
        let logits = data.as_slice::<f32>().unwrap_or_default();
        // A model may support more ids than the tokenizer has tokens.
        let known = vocab_size.min(self.tokenizer.vocab_size()).min(logits.len());
        let odd = Sampling::non_finite(&logits[..known]);
        let choice = match odd {
            Some(_) => -1.0,
            None => f64::from(self.sampling.choose(&logits[..known], self.chosen as u64)),
        };
        let choice = agree(choice)?;
        if choice < 0.0 {
            let (what, value) = ("the score of the next token", f64::from(odd.unwrap_or(f32::NAN)));
            return Err(TrainError::NotANumber { what, value });
        }
        let next = choice as u32;
        self.chosen += 1;
        self.ended = self.ends.contains(&next);
        if !self.ended {
            self.ids.push(next);
        }
        Ok(!self.ended)
    }

    /// Returns the token ids of the text so far, prompt included.
    pub fn ids(&self) -> &[u32] {
        &self.ids[self.hidden..]
    }

    /// Returns the text so far, prompt included. Its last character may be incomplete.
    pub fn text(&self) -> Result<String, DataError> {
        self.tokenizer.decode(self.ids())
    }

    /// Returns the text that the model has added to the prompt. Its last character may be incomplete.
    pub fn added(&self) -> Result<String, DataError> {
        // The text of a token may depend on the tokens before it.
        let (text, prompt) = (self.text()?, self.tokenizer.decode(&self.ids[self.hidden..self.given])?);
        match text.strip_prefix(&*prompt) {
            Some(added) => Ok(added.to_owned()),
            None => self.tokenizer.decode(&self.ids[self.given..]),
        }
    }

    fn unread(&mut self) -> &[u32] {
        let capacity = self.cache.capacity();
        let count = self.ids.len() - self.read;
        if count <= capacity - self.cache.len() {
            return &self.ids[self.read..];
        }
        // A prompt may fill the whole context; of a text that has outgrown it, the last half is kept.
        let keep = if self.cache.is_empty() { capacity } else { (capacity / 2).max(1) };
        self.cache.clear();
        &self.ids[self.ids.len() - keep..]
    }
}
