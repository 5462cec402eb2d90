//! Texts that a model continues together, one token for each in every forward pass.

use burn::tensor::Device;
use kiln_model::KeyValueCache;
use kiln_model::decoder::{self, Modules};
use kiln_shard::ShardError;

use super::{Continuation, Sampling};
use crate::error::{Result, TrainError};
use kiln_config::device;

/// Texts whose prompts have equal numbers of tokens, and the model's cache of their keys and values.
///
/// The first pass reads each distinct prompt once, however many texts start with it. After that, a pass reads one
/// token of each text. Texts that have ended leave the cache. When the context is full, a pass rereads the last half
/// of each text from position 0.
///
/// A text does not depend on the others of its batch, except for the rounding of logits.
#[derive(Debug)]
pub struct Batch<'a> {
    texts: Vec<Continuation<'a>>,
    /// Indices of the texts that have not ended, in the order of the sequences in the cache.
    live: Vec<usize>,
    cache: KeyValueCache,
    /// Number of ids of each such text that the model has read, or that were dropped unread because the context is
    /// full.
    read: usize,
    /// Number of leading ids that are not in the cache, because the context was full.
    dropped: usize,
}

impl<'a> Batch<'a> {
    /// Starts a batch of texts that no batch has advanced yet.
    ///
    /// # Panics
    ///
    /// If the prompts differ in their number of tokens.
    pub fn new(texts: Vec<Continuation<'a>>) -> Self {
        let lengths: Vec<_> = texts.iter().map(|text| text.all_ids().len()).collect();
        let is_even = lengths.windows(2).all(|pair| pair[0] == pair[1]);
        assert!(is_even, "a batch of prompts with different numbers of tokens: {lengths:?}");
        let capacity = texts.iter().map(Continuation::positions).max().unwrap_or(1);
        let live = (0..texts.len()).filter(|index| texts[*index].end().is_none()).collect();
        Batch { texts, live, cache: KeyValueCache::new(capacity), read: 0, dropped: 0 }
    }

    /// Returns the texts, in the order in which they were given.
    pub fn texts(&self) -> &[Continuation<'a>] {
        &self.texts
    }

    /// Returns the texts, in the order in which they were given.
    pub fn into_texts(self) -> Vec<Continuation<'a>> {
        self.texts
    }

    /// Replaces the batch by one text, such as the next turn of a conversation. Keeps the cache if the text starts with
    /// the tokens in the cache, so that a pass reads only the others.
    ///
    /// # Panics
    ///
    /// If the batch has several texts.
    pub fn follow(&mut self, next: Continuation<'a>) {
        assert_eq!(self.texts.len(), 1, "a batch of several texts has no next text");
        let ids = next.all_ids();
        let known = &self.texts[0].all_ids()[..self.read];
        let continues = self.dropped == 0 && ids.len() > known.len() && ids.starts_with(known);
        let (positions, capacity) = (next.positions(), self.cache.capacity());
        if positions > capacity {
            // Room for later turns, so that few turns need a larger cache.
            let room = (2 * positions).min(next.context_length()).max(positions);
            self.cache = KeyValueCache::new(room);
            self.read = 0;
        } else if !continues {
            self.cache.clear();
            self.read = 0;
        }
        self.dropped = 0;
        self.live = if next.end().is_none() { vec![0] } else { Vec::new() };
        self.texts = vec![next];
    }

    /// Adds a token to each text that has not ended. Returns whether any text continues. Calls `after_pass` before
    /// using the logits.
    ///
    /// # Errors
    ///
    /// If the logits are not finite, or if `after_pass` or the tokenizer fails.
    pub fn advance<P: Modules>(
        &mut self,
        modules: &P,
        device: &Device,
        after_pass: impl FnOnce() -> Result<(), ShardError>,
    ) -> Result<bool> {
        self.advance_together(modules, device, after_pass, Ok)
    }

    /// Like [`Batch::advance`] on several ranks: `agree` returns one rank's choices on all ranks.
    /// A choice is a token id, or negative if the logits are not finite.
    pub fn advance_together<P: Modules>(
        &mut self,
        modules: &P,
        device: &Device,
        after_pass: impl FnOnce() -> Result<(), ShardError>,
        agree: impl FnOnce(Vec<f64>) -> Result<Vec<f64>, ShardError>,
    ) -> Result<bool> {
        if self.live.is_empty() {
            return Ok(false);
        }
        let first = self.first_unread();
        let unread = |index: &usize| &self.texts[*index].all_ids()[first..];
        // In an empty cache, equal sequences are computed once. The row of each live text in the pass:
        let is_empty = self.cache.is_empty();
        let (mut sequences, mut row_of) = (Vec::new(), Vec::new());
        for ids in self.live.iter().map(unread) {
            let known = sequences.iter().position(|known| is_empty && *known == ids);
            row_of.push(known.unwrap_or(sequences.len()));
            if known.is_none() {
                sequences.push(ids);
            }
        }
        let (batch, seq) = (sequences.len(), sequences[0].len());
        let ids = sequences.concat().into_iter().map(|id| id as i32).collect();
        let Ok(logits) = decoder::next_logits(modules, device::tokens(ids, batch, seq, device), &self.cache)
        else {
            unreachable!("invariant: `first_unread` returns no more than there is room for")
        };
        self.read = first + seq;
        after_pass()?;
        let [_, vocab_size] = logits.dims();
        let data = logits.into_data().convert::<f32>();
        let logits = data.as_slice::<f32>().unwrap_or_default();
        let logits_of: Vec<_> = self
            .live
            .iter()
            .zip(&row_of)
            .map(|(index, row)| &logits[row * vocab_size..][..self.texts[*index].known(vocab_size)])
            .collect();
        let odd = logits_of.iter().find_map(|logits| Sampling::non_finite(logits));
        let choices = match odd {
            Some(_) => vec![-1.0; self.live.len()],
            None => self
                .live
                .iter()
                .zip(&logits_of)
                .map(|(index, logits)| f64::from(self.texts[*index].choose(logits)))
                .collect(),
        };
        let choices = agree(choices)?;
        if choices.iter().any(|choice| *choice < 0.0) {
            let (what, value) = ("the score of the next token", f64::from(odd.unwrap_or(f32::NAN)));
            return Err(TrainError::NotANumber { what, value });
        }
        for ((index, logits), choice) in self.live.iter().zip(logits_of).zip(choices) {
            let id = choice as u32;
            self.texts[*index].add(id, Sampling::log_probability(logits, id))?;
        }
        self.drop_ended(&row_of);
        Ok(!self.live.is_empty())
    }

    /// Returns the index of the first id to read of each text. Clears the cache if it has no room for the rest.
    fn first_unread(&mut self) -> usize {
        let (capacity, count) = (self.cache.capacity(), self.texts[self.live[0]].all_ids().len());
        if count - self.read <= capacity - self.cache.len() {
            return self.read;
        }
        // A prompt may fill the whole context; of a text that has outgrown it, the last half is kept.
        let keep = if self.cache.is_empty() { capacity } else { (capacity / 2).max(1) };
        self.cache.clear();
        self.dropped = count - keep;
        self.dropped
    }

    /// Keeps only the texts that have not ended. `row_of` has the sequence in the cache of each live text.
    fn drop_ended(&mut self, row_of: &[usize]) {
        let continues = |index: &usize| self.texts[*index].end().is_none();
        let (live, rows): (Vec<_>, Vec<_>) = self
            .live
            .iter()
            .zip(row_of)
            .filter(|(index, _)| continues(index))
            .map(|(index, row)| (*index, *row))
            .unzip();
        let is_same = rows.iter().enumerate().all(|(index, row)| index == *row)
            && rows.len() == row_of.iter().max().map_or(0, |row| row + 1);
        if !live.is_empty() && !is_same {
            self.cache.select(&rows);
        }
        self.live = live;
    }
}
