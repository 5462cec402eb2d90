//! One pass over the text, which writes both token files.

use super::document::Corpus;
use super::mix::mix_pair;
use super::progress::{OnProgress, Progress, check};
use super::remark::PassedOver;
use super::resume::{RECORD_BYTES, Record};
use super::split_writer::SplitWriter;
use super::{PrepareOptions, Result, Split, TextChunk, Tokenizer};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

/// TextChunks encoded together: enough to occupy many cores, two megabytes of
/// text, which the tokenizer blows up to a multiple of that.
const CHUNKS_PER_BATCH: usize = 256;

/// One pass over the text that writes both token files.
pub(super) struct Pass<'a> {
    tokenizer: &'a Tokenizer,
    pub(super) end_of_text: u32,
    validation_fraction: f64,
    seed: u64,
    stop: &'a AtomicBool,
    folder: PathBuf,
    /// Chunks that are in the token files already, when this begins.
    there: u64,
    /// Text up to the last record, in bytes.
    recorded: u64,
    /// A chunk whose split is given rather than drawn.
    pub(super) forced: Option<(u64, Split)>,
    pub(super) train: SplitWriter,
    pub(super) validation: SplitWriter,
    /// The split of the last chunk, while its document goes on.
    unfinished: Option<Split>,
    pub(super) chunks: u64,
    pub(super) documents: u64,
    pub(super) passed_over: PassedOver,
    pub(super) text_bytes: u64,
    /// Size and index of the two longest chunks, the longest first.
    pub(super) longest: [(usize, u64); 2],
}

impl<'a> Pass<'a> {
    pub(super) fn new(
        tokenizer: &'a Tokenizer,
        folder: &Path,
        options: &PrepareOptions,
        stop: &'a AtomicBool,
    ) -> Result<Self> {
        let create = |split: Split| SplitWriter::create(folder, split, tokenizer.vocab_size());
        let writers = [create(Split::Train)?, create(Split::Validation)?];
        Self::on(writers, Record::default(), tokenizer, folder, options, stop)
    }

    /// A pass that goes on from `record`. `None` if the token files do not have what it counts.
    pub(super) fn resume(
        record: Record,
        tokenizer: &'a Tokenizer,
        folder: &Path,
        options: &PrepareOptions,
        stop: &'a AtomicBool,
    ) -> Result<Option<Self>> {
        let reopen = |split, tokens| SplitWriter::reopen(folder, split, tokenizer.vocab_size(), tokens);
        let writers = [reopen(Split::Train, record.train)?, reopen(Split::Validation, record.validation)?];
        let [Some(train), Some(validation)] = writers else { return Ok(None) };
        Self::on([train, validation], record, tokenizer, folder, options, stop).map(Some)
    }

    fn on(
        [train, validation]: [SplitWriter; 2],
        record: Record,
        tokenizer: &'a Tokenizer,
        folder: &Path,
        options: &PrepareOptions,
        stop: &'a AtomicBool,
    ) -> Result<Self> {
        Ok(Self {
            tokenizer,
            end_of_text: tokenizer.end_of_text()?,
            validation_fraction: options.validation_fraction,
            seed: options.seed,
            stop,
            folder: folder.to_owned(),
            there: record.chunks,
            recorded: record.text_bytes,
            forced: None,
            train,
            validation,
            unfinished: None,
            chunks: 0,
            documents: 0,
            passed_over: PassedOver::default(),
            text_bytes: 0,
            longest: [(0, 0); 2],
        })
    }

    pub(super) fn run(&mut self, corpus: &Corpus, progress: OnProgress<'_>) -> Result<()> {
        let mut chunks = corpus.chunks();
        loop {
            check(self.stop)?;
            let batch = chunks.by_ref().take(CHUNKS_PER_BATCH).collect::<Result<Vec<TextChunk>, _>>()?;
            if batch.is_empty() {
                break;
            }
            let there = usize::try_from(self.there.saturating_sub(self.chunks)).unwrap_or(usize::MAX);
            let (there, new) = batch.split_at(there.min(batch.len()));
            for chunk in there {
                self.write(chunk, None)?;
            }
            let texts = new.iter().map(|chunk| chunk.text.as_str()).collect();
            for (chunk, ids) in new.iter().zip(self.tokenizer.encode_batch(texts)?) {
                self.write(chunk, Some(&ids))?;
            }
            self.documents = chunks.documents();
            if !new.is_empty() && self.text_bytes.saturating_sub(self.recorded) >= RECORD_BYTES {
                self.record()?;
            }
            progress(Progress::Encoding {
                input_bytes: corpus.bytes(),
                text_bytes: self.text_bytes,
                documents: self.documents,
                tokens: self.train.tokens() + self.validation.tokens(),
            });
        }
        self.passed_over = chunks.passed_over().clone();
        Ok(())
    }

    /// Records how far this is, for a prepare that goes on from here.
    fn record(&mut self) -> Result<()> {
        // A choice by hand comes after a pass over all of the text, which is small.
        if self.forced.is_some() {
            return Ok(());
        }
        self.train.sync()?;
        self.validation.sync()?;
        let (train, validation) = (self.train.tokens(), self.validation.tokens());
        let (chunks, text_bytes) = (self.chunks, self.text_bytes);
        self.recorded = text_bytes;
        Record { chunks, text_bytes, train, validation }.save(&self.folder)
    }

    /// Writes the `ids` of a chunk; `None` if they are in the files already.
    fn write(&mut self, chunk: &TextChunk, ids: Option<&[u32]>) -> Result<()> {
        let split = self.draw(self.chunks);
        let end_of_text: &[u32] = if ids.is_some() { &[self.end_of_text] } else { &[] };
        let ids = ids.unwrap_or_default();
        // Text that goes on in the other split ends here: without the token, the text
        // after the gap would look like its continuation.
        if let Some(previous) = self.unfinished.filter(|&previous| previous != split) {
            self.writer(previous).write(end_of_text, 0)?;
        }
        self.writer(split).write(ids, chunk.text.len())?;
        self.unfinished = Some(split);
        if chunk.ends_document {
            self.writer(split).write(end_of_text, 0)?;
            self.unfinished = None;
        }

        let size = chunk.text.len();
        if size > self.longest[0].0 {
            self.longest = [(size, self.chunks), self.longest[0]];
        } else if size > self.longest[1].0 {
            self.longest[1] = (size, self.chunks);
        }
        self.chunks += 1;
        self.text_bytes += size as u64;
        Ok(())
    }

    /// The split of a chunk.
    fn draw(&self, chunk: u64) -> Split {
        match self.forced {
            Some((index, split)) if index == chunk => return split,
            _ => {}
        }
        // 53 bits: as many as a number in 0..1 can hold.
        let number = (mix_pair(self.seed, chunk) >> 11) as f64 / (1_u64 << 53) as f64;
        if number < self.validation_fraction { Split::Validation } else { Split::Train }
    }

    fn writer(&mut self, split: Split) -> &mut SplitWriter {
        match split {
            Split::Train => &mut self.train,
            Split::Validation => &mut self.validation,
        }
    }

    pub(super) fn empty_split(&self) -> Option<Split> {
        match (self.train.tokens(), self.validation.tokens()) {
            (0, _) => Some(Split::Train),
            (_, 0) => Some(Split::Validation),
            _ => None,
        }
    }
}
