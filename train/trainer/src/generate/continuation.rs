//! One text that grows token by token, and where it ends.

use kiln_model::Key;
use serde::Serialize;

use super::Sampling;
use super::stream::TextStream;
use kiln_data::{DataError, Tokenizer};

/// A text being generated: its token ids, and what it says so far. A [`Batch`](super::Batch) adds the tokens.
#[derive(Clone, Debug)]
pub struct Continuation<'a> {
    tokenizer: &'a Tokenizer,
    sampling: Sampling,
    ends: Vec<u32>,
    ids: Vec<u32>,
    /// Number of leading ids outside the text, which the tokenizer adds or which replace an empty prompt.
    hidden: usize,
    /// Number of leading ids that come from the prompt, including the hidden ones.
    given: usize,
    log_probabilities: Vec<f64>,
    stream: TextStream,
    added: String,
    end: Option<End>,
}

/// The reason why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// The model chose an end-of-text token, which is not part of the text.
    EndToken,
    /// The text contained a stop string. The text ends before it.
    StopString,
    /// The text has the maximum number of new tokens.
    Length,
}

impl<'a> Continuation<'a> {
    /// Starts a text with `prompt`.
    ///
    /// # Errors
    ///
    /// If the tokenizer cannot express the prompt, or if neither it nor `sampling` defines an end-of-text token.
    pub fn new(tokenizer: &'a Tokenizer, prompt: &str, sampling: &Sampling) -> Result<Self, DataError> {
        let (hidden, ids) = tokenizer.encode_prompt(prompt)?;
        Self::start(tokenizer, hidden, ids, sampling)
    }

    /// Starts a text with these token ids.
    ///
    /// # Errors
    ///
    /// If neither the tokenizer nor `sampling` defines an end-of-text token.
    pub fn from_ids(tokenizer: &'a Tokenizer, ids: Vec<u32>, sampling: &Sampling) -> Result<Self, DataError> {
        Self::start(tokenizer, 0, ids, sampling)
    }

    fn start(
        tokenizer: &'a Tokenizer,
        mut hidden: usize,
        mut ids: Vec<u32>,
        sampling: &Sampling,
    ) -> Result<Self, DataError> {
        let mut sampling = sampling.clone();
        sampling.stop.retain(|stop| !stop.is_empty());
        let mut ends = sampling.end_ids.clone();
        match tokenizer.end_of_text() {
            Ok(end) => ends.insert(0, end),
            Err(error) if ends.is_empty() => return Err(error),
            Err(_) => {}
        }
        if ids.is_empty() {
            // An end-of-text token replaces an empty prompt: after it, the model expects a new document.
            (hidden, ids) = (1, vec![ends[0]]);
        }
        let given = ids.len();
        let stream = TextStream::after(given - hidden);
        let end = (sampling.max_tokens == 0).then_some(End::Length);
        let (log_probabilities, added) = (Vec::new(), String::new());
        Ok(Continuation {
            tokenizer,
            sampling,
            ends,
            ids,
            hidden,
            given,
            log_probabilities,
            stream,
            added,
            end,
        })
    }

    /// Replaces the key of the random choices.
    pub fn with_key(mut self, key: Key) -> Self {
        self.sampling.key = key;
        self
    }

    /// Returns the key of the random choices.
    pub fn key(&self) -> Key {
        self.sampling.key
    }

    /// Returns the token ids of the text so far, prompt included.
    pub fn ids(&self) -> &[u32] {
        &self.ids[self.hidden..]
    }

    /// Returns all token ids that the model has to read, including those in front of the text.
    pub(super) fn all_ids(&self) -> &[u32] {
        &self.ids
    }

    /// Returns the ids of the generated tokens. With a stop string, they include its tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.ids[self.given..]
    }

    /// Returns the natural logarithm of the model's probability of each generated token. Temperature and the like do
    /// not change it.
    pub fn log_probabilities(&self) -> &[f64] {
        &self.log_probabilities
    }

    /// Returns why the text ended; `None` if it has not.
    pub fn end(&self) -> Option<End> {
        self.end
    }

    /// Returns the text so far, prompt included, without an incomplete last character that later tokens may complete.
    ///
    /// # Errors
    ///
    /// If the decoder of a loaded tokenizer fails.
    pub fn text(&self) -> Result<String, DataError> {
        Ok(self.prompt()? + &self.added)
    }

    /// Returns the text of the prompt's tokens.
    ///
    /// # Errors
    ///
    /// Those of [`Self::text`].
    pub fn prompt(&self) -> Result<String, DataError> {
        self.tokenizer.decode(&self.ids[self.hidden..self.given])
    }

    /// Returns the text that the model has added to the prompt, without an incomplete last character that later
    /// tokens may complete.
    pub fn added(&self) -> &str {
        &self.added
    }

    /// Returns the part of [`Self::added`] that later tokens cannot remove: the rest may be the start of a stop
    /// string.
    pub fn settled(&self) -> &str {
        if self.end.is_some() {
            return &self.added;
        }
        let starts_stop =
            |index: &usize| self.sampling.stop.iter().any(|stop| stop.starts_with(&self.added[*index..]));
        let tail = self.tail();
        let cut =
            (tail..self.added.len()).filter(|index| self.added.is_char_boundary(*index)).find(starts_stop);
        &self.added[..cut.unwrap_or(self.added.len())]
    }

    /// Returns the index in `added` from which on a stop string may be incomplete.
    fn tail(&self) -> usize {
        let longest = self.sampling.stop.iter().map(String::len).max().unwrap_or(0);
        self.added.floor_char_boundary((self.added.len() + 1).saturating_sub(longest))
    }

    /// Returns the number of ids that have a logit and a token: a model may support more ids than the tokenizer.
    pub(super) fn known(&self, vocab_size: usize) -> usize {
        vocab_size.min(self.tokenizer.vocab_size())
    }

    /// Returns the largest number of positions that the model has to remember.
    pub(super) fn positions(&self) -> usize {
        let positions = self.given.saturating_add(self.sampling.max_tokens);
        positions.min(self.sampling.context_length).max(1)
    }

    /// Returns the maximum number of tokens that the model reads at a time.
    pub(super) fn context_length(&self) -> usize {
        self.sampling.context_length
    }

    /// Chooses the next token, given the logits of all tokens of the tokenizer.
    pub(super) fn choose(&self, logits: &[f32]) -> u32 {
        self.sampling.choose(logits, &self.ids, self.log_probabilities.len() as u64)
    }

    /// Adds a token, or ends the text.
    pub(super) fn add(&mut self, id: u32, log_probability: f64) -> Result<(), DataError> {
        if self.ends.contains(&id) {
            return self.end_with(End::EndToken);
        }
        self.ids.push(id);
        self.log_probabilities.push(log_probability);
        let ids = &self.ids[self.hidden..];
        let piece = self.stream.next(ids, |ids| self.tokenizer.decode(ids))?;
        if self.says(&piece) {
            self.end = Some(End::StopString);
        } else if self.log_probabilities.len() == self.sampling.max_tokens {
            self.end_with(End::Length)?;
        }
        Ok(())
    }

    fn end_with(&mut self, end: End) -> Result<(), DataError> {
        let rest = self.stream.rest(&self.ids[self.hidden..], |ids| self.tokenizer.decode(ids))?;
        self.end = Some(if self.says(&rest) { End::StopString } else { end });
        Ok(())
    }

    /// Adds `piece` to the text. Cuts the text before the first stop string and returns whether there is one.
    fn says(&mut self, piece: &str) -> bool {
        let from = self.tail();
        self.added += piece;
        let found = self.sampling.stop.iter().filter_map(|stop| self.added[from..].find(stop));
        let Some(first) = found.min() else { return false };
        self.added.truncate(from + first);
        true
    }
}
