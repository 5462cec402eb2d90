//! A text that a model continues token by token.

use burn::tensor::Device;
use kiln_model::KeyValueCache;
use kiln_model::decoder::{self, Modules};
use kiln_shard::ShardError;

use super::Sampling;
use crate::data::{DataError, Tokenizer};
use crate::device;
use crate::error::{Result, TrainError};

/// A text on its way: token ids, and what the model has kept of them.
///
/// The first pass reads the prompt (of a prompt longer than the context its end), every further one
/// the token chosen last. When the context is full, the next pass starts over from the last half of
/// it, at position 0: a token costs one position almost always, and half a context now and then.
pub struct Continuation<'a> {
    tokenizer: &'a Tokenizer,
    sampling: &'a Sampling,
    ends: Vec<u32>,
    ids: Vec<u32>,
    /// Ids at the front that are not part of the text: what the tokenizer puts there, or what an empty prompt
    /// starts from.
    hidden: usize,
    /// Ids at the front that the prompt has, the hidden ones included.
    given: usize,
    cache: KeyValueCache,
    /// Ids that the model has read, or that have left its context unread.
    read: usize,
    /// Tokens chosen.
    chosen: usize,
    ended: bool,
}

impl<'a> Continuation<'a> {
    /// A text that starts with `prompt`.
    ///
    /// # Errors
    ///
    /// If the tokenizer cannot express the prompt, or knows no end of text while `sampling` has no
    /// ends either.
    pub fn new(tokenizer: &'a Tokenizer, prompt: &str, sampling: &'a Sampling) -> Result<Self, DataError> {
        let mut ends = sampling.end_ids.clone();
        match tokenizer.end_of_text() {
            Ok(end) => ends.insert(0, end),
            Err(error) if ends.is_empty() => return Err(error),
            Err(_) => {}
        }
        let (mut hidden, mut ids) = tokenizer.encode_prompt(prompt)?;
        if ids.is_empty() {
            // Nothing to go on from: start as a document starts, after the end of another.
            (hidden, ids) = (1, vec![ends[0]]);
        }
        let given = ids.len();
        let positions = given.saturating_add(sampling.max_tokens);
        let cache = KeyValueCache::new(positions.min(sampling.context_length).max(1));
        let (read, chosen, ended) = (0, 0, false);
        Ok(Continuation { tokenizer, sampling, ends, ids, hidden, given, cache, read, chosen, ended })
    }

    /// Chooses the next token, and returns whether there was one: false at the end of the text.
    /// `after_pass` is called after the forward pass, before its result is used.
    pub fn advance<P: Modules>(
        &mut self,
        modules: &P,
        device: &Device,
        after_pass: impl FnOnce() -> Result<(), ShardError>,
    ) -> Result<bool> {
        self.advance_together(modules, device, after_pass, Ok)
    }

    /// [`Continuation::advance`] on several ranks: `agree` is given the choice of each, and returns that of one of
    /// them on all. A choice is the id of a token, or negative if the scores are not numbers.
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
        // A model may have room for more ids than the tokenizer has tokens.
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

    /// The token ids of the text so far, prompt included.
    pub fn ids(&self) -> &[u32] {
        &self.ids[self.hidden..]
    }

    /// The text so far, prompt included. A character may be incomplete at its end.
    pub fn text(&self) -> Result<String, DataError> {
        self.tokenizer.decode(self.ids())
    }

    /// What the model has added to the prompt. A character may be incomplete at its end.
    pub fn added(&self) -> Result<String, DataError> {
        // What a token stands for may depend on those before it.
        let (text, prompt) = (self.text()?, self.tokenizer.decode(&self.ids[self.hidden..self.given])?);
        match text.strip_prefix(&*prompt) {
            Some(added) => Ok(added.to_owned()),
            None => self.tokenizer.decode(&self.ids[self.given..]),
        }
    }

    /// The ids that the model is to read next, for which the cache has room.
    fn unread(&mut self) -> &[u32] {
        let capacity = self.cache.capacity();
        let count = self.ids.len() - self.read;
        if count <= capacity - self.cache.len() {
            return &self.ids[self.read..];
        }
        // All of a prompt that fills the context; of a text that has outgrown it the last half.
        let keep = if self.cache.is_empty() { capacity } else { (capacity / 2).max(1) };
        self.cache.clear();
        &self.ids[self.ids.len() - keep..]
    }
}
