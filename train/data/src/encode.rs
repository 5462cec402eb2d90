//! Encoding the text into the two token files.

use super::blocks::{BLOCK_BYTES, BlockWriter};
use super::counts::{Spellings, Unknown};
use super::cut::Cuts;
use super::division::Division;
use super::document::{Corpus, Findings};
use super::progress::{OnProgress, Progress, check};
use super::{DataError, Result, Split, SplitInfo, TextChunk, TokenWidth, Tokenizer};
use rayon::prelude::*;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
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
    pub(super) findings: Findings,
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
            unknown_tokens: Unknown::new(encoder.tokenizer),
            spellings: Spellings::new(encoder.tokenizer.special_tokens()),
            encoder,
            stop,
            train: create(Split::Train)?,
            validation: create(Split::Validation)?,
            documents: 0,
            findings: Findings::default(),
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
        self.findings = chunks.findings();
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
}

/// Bytes of a token file that are written at a time.
const BUFFER_BYTES: usize = 1 << 20;

/// Writes token ids while counting and hashing them.
pub(super) struct SplitWriter {
    path: PathBuf,
    file: BufWriter<File>,
    width: TokenWidth,
    hasher: Sha256,
    /// Writes the checksums of the blocks of the file.
    blocks: BlockWriter,
    tokens: u64,
    text_bytes: u64,
    /// Number of occurrences of each token.
    counts: Vec<u64>,
    /// The bytes of the ids being written.
    bytes: Vec<u8>,
}

impl SplitWriter {
    /// Creates the token file of `split` in `folder`, and its file of block checksums.
    pub(super) fn create(folder: &Path, split: Split, vocab_size: usize) -> Result<Self> {
        let path = folder.join(split.file_name());
        let file = File::create(&path).map_err(DataError::io("create", &path))?;
        Ok(Self {
            blocks: BlockWriter::create(folder.join(split.block_sums_name()))?,
            path,
            file: BufWriter::with_capacity(BUFFER_BYTES, file),
            width: TokenWidth::of_vocabulary(vocab_size),
            hasher: Sha256::new(),
            tokens: 0,
            text_bytes: 0,
            counts: vec![0; vocab_size],
            bytes: Vec::new(),
        })
    }

    /// Appends ids, which are below the vocabulary size, that represent `text_bytes` bytes of text.
    pub(super) fn write(&mut self, ids: &[u32], text_bytes: usize) -> Result<()> {
        self.bytes.clear();
        for &id in ids {
            self.counts[id as usize] += 1;
            let encoded = id.to_le_bytes();
            self.bytes.extend_from_slice(&encoded[..self.width.bytes()]);
        }
        self.tokens += ids.len() as u64;
        self.text_bytes += text_bytes as u64;
        self.hasher.update(&self.bytes);
        self.blocks.update(&self.bytes)?;
        self.file.write_all(&self.bytes).map_err(DataError::io("write", &self.path))
    }

    /// Tokens written so far.
    pub(super) fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Writes everything to disk; returns the entry for `data.json` and how often each token occurs.
    pub(super) fn finish(self) -> Result<(SplitInfo, Vec<u64>)> {
        self.file
            .into_inner()
            .map_err(|error| error.into_error())
            .and_then(|file| file.sync_all())
            .map_err(DataError::io("write", &self.path))?;
        self.blocks.finish()?;
        let info = SplitInfo {
            tokens: self.tokens,
            text_bytes: Some(self.text_bytes),
            block_bytes: Some(BLOCK_BYTES),
            sha256: Some(format!("{:x}", self.hasher.finalize())),
        };
        Ok((info, self.counts))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_little_endian_ids_of_the_right_width() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("train.bin");
        for (vocab_size, expected) in [(1000, vec![1, 0, 3, 2]), (70_000, vec![1, 0, 0, 0, 3, 2, 0, 0])] {
            let mut writer = SplitWriter::create(folder.path(), Split::Train, vocab_size).unwrap();
            writer.write(&[1], 4).unwrap();
            writer.write(&[0x203], 5).unwrap();
            let (info, counts) = writer.finish().unwrap();
            assert_eq!(std::fs::read(&path).unwrap(), expected);
            assert_eq!((info.tokens, info.text_bytes), (2, Some(9)));
            assert_eq!(info.sha256, Some(format!("{:x}", Sha256::digest(&expected))));
            assert_eq!((counts[0], counts[1], counts[0x203]), (0, 1, 1));
        }
    }
}
