//! One pass over the text, which writes both token files.

use super::cut::Cuts;
use super::division::Division;
use super::document::Corpus;
use super::progress::{OnProgress, Progress, check};
use super::reader::BadLines;
use super::remark::{JsonFiles, PassedOver};
use super::spellings::Spellings;
use super::split_writer::SplitWriter;
use super::unknown::Unknown;
use super::{DataError, Result, Split, TextChunk, Tokenizer};
use rayon::prelude::*;
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// Bytes of text that are encoded together: enough to occupy many cores, and little enough that the
/// tokenizer, which takes about 150 times as much memory, does not exhaust the memory.
const BATCH_BYTES: usize = if cfg!(test) { 128 << 10 } else { 2 << 20 };

/// Turns documents into tokens.
pub(super) struct Encoder<'a> {
    pub(super) tokenizer: &'a Tokenizer,
    /// Tokens in front of every document.
    pub(super) start: Vec<u32>,
    /// The token after every document.
    pub(super) end: u32,
    pub(super) division: &'a Division,
}

/// One pass over the text that writes both token files.
pub(super) struct Pass<'a> {
    encoder: &'a Encoder<'a>,
    cuts: Cuts,
    stop: &'a AtomicBool,
    unknown_tokens: Unknown,
    pub(super) train: SplitWriter,
    pub(super) validation: SplitWriter,
    pub(super) documents: u64,
    pub(super) passed_over: PassedOver,
    pub(super) bad_lines: BadLines,
    pub(super) json: JsonFiles,
    pub(super) text_bytes: u64,
    /// Number of tokens that stand for text which the tokenizer cannot express, or of characters omitted for
    /// that reason.
    pub(super) unknown: u64,
    /// Spellings of special tokens in the text.
    pub(super) spellings: Spellings,
}

impl<'a> Pass<'a> {
    pub(super) fn new(encoder: &'a Encoder<'a>, folder: &Path, stop: &'a AtomicBool) -> Result<Self> {
        let create = |split: Split| SplitWriter::create(folder, split, encoder.tokenizer.vocab_size());
        Ok(Self {
            cuts: encoder.tokenizer.cuts(),
            unknown_tokens: Unknown::of(encoder.tokenizer),
            spellings: Spellings::new(encoder.tokenizer.special_tokens()),
            encoder,
            stop,
            train: create(Split::Train)?,
            validation: create(Split::Validation)?,
            documents: 0,
            passed_over: PassedOver::default(),
            bad_lines: BadLines::default(),
            json: JsonFiles::default(),
            text_bytes: 0,
            unknown: 0,
        })
    }

    pub(super) fn run(&mut self, corpus: &Corpus, progress: OnProgress<'_>) -> Result<()> {
        let mut chunks = corpus.chunks(self.cuts, self.encoder.division);
        loop {
            check(self.stop)?;
            let (mut batch, mut bytes) = (Vec::new(), 0);
            while bytes < BATCH_BYTES
                && let Some(chunk) = chunks.next()
            {
                let chunk = chunk?;
                bytes += chunk.text.len();
                batch.push(chunk);
            }
            if batch.is_empty() {
                break;
            }
            for (chunk, ids) in batch.iter().zip(self.encode(&batch)?) {
                self.spellings.count(&chunk.text);
                self.text_bytes += chunk.text.len() as u64;
                self.write(chunk, &ids)?;
            }
            self.documents = chunks.documents();
            progress(Progress::Encoding {
                input_bytes: corpus.bytes(),
                text_bytes: self.text_bytes,
                documents: self.documents,
                tokens: self.train.tokens() + self.validation.tokens(),
            });
        }
        self.passed_over = chunks.passed_over().clone();
        self.bad_lines = chunks.bad_lines();
        self.json = chunks.json().clone();
        Ok(())
    }

    /// The ids of each chunk, computed on all cores.
    fn encode(&mut self, chunks: &[TextChunk]) -> Result<Vec<Vec<u32>>> {
        let texts: Vec<&str> =
            chunks.iter().map(|chunk| self.cuts.as_encoded(&chunk.text, chunk.starts)).collect();
        let ids = self.encoder.tokenizer.encode_batch(texts.clone())?;
        let unknown = texts.par_iter().zip(&ids).map(|(text, ids)| self.unknown_tokens.count(text, ids));
        self.unknown += unknown.sum::<Result<u64, DataError>>()?;
        Ok(ids)
    }

    /// Writes the `ids` of a chunk.
    fn write(&mut self, chunk: &TextChunk, ids: &[u32]) -> Result<()> {
        let encoder = self.encoder;
        let writer = self.writer(chunk.split);
        if chunk.starts {
            writer.write(&encoder.start, 0)?;
        }
        writer.write(ids, chunk.text.len())?;
        if chunk.ends {
            writer.write(&[encoder.end], 0)?;
        }
        Ok(())
    }

    fn writer(&mut self, split: Split) -> &mut SplitWriter {
        match split {
            Split::Train => &mut self.train,
            Split::Validation => &mut self.validation,
        }
    }

    /// Reports whether one of the splits has no text.
    pub(super) fn has_empty_split(&self) -> bool {
        self.train.tokens() == 0 || self.validation.tokens() == 0
    }
}
