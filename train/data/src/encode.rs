use super::blocks::{BLOCK_BYTES, BlockWriter};
use super::corpus::{Corpus, Findings};
use super::counts::{Spellings, Unknown};
use super::division::Division;
use super::progress::{OnProgress, Progress, check};
use super::{DataError, Result, Split, SplitInfo, TokenWidth, Tokenizer};
use rayon::prelude::*;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

/// Bytes of text encoded together: enough to occupy many cores. The tokenizer takes about 150 times as much memory.
const BATCH_BYTES: usize = if cfg!(test) { 128 << 10 } else { 2 << 20 };

pub(super) struct Encoder<'a> {
    pub(super) tokenizer: &'a Tokenizer,
    /// Ids of the tokens in front of every document.
    pub(super) start: Vec<u32>,
    /// Id of the token after every document.
    pub(super) end: u32,
    pub(super) division: &'a Division,
}

pub(super) struct Encoded {
    pub(super) train: SplitWriter,
    pub(super) validation: SplitWriter,
    pub(super) documents: u64,
    pub(super) text_bytes: u64,
    pub(super) findings: Findings,
    /// Number of unknown tokens, or of characters omitted because the tokenizer has no unknown token.
    pub(super) unknown: u64,
    pub(super) spellings: Spellings,
}

impl Encoder<'_> {
    /// Writes the tokens of `corpus` to both token files in `folder`, encoding on all cores.
    pub(super) fn encode(
        &self,
        corpus: &Corpus,
        folder: &Path,
        stop: &AtomicBool,
        progress: OnProgress<'_>,
    ) -> Result<Encoded> {
        let Self { tokenizer, start, end, division } = self;
        let mut train = SplitWriter::create(folder, Split::Train, tokenizer.vocab_size())?;
        let mut validation = SplitWriter::create(folder, Split::Validation, tokenizer.vocab_size())?;
        let mut spellings = Spellings::new(tokenizer.special_tokens());
        let unknown_tokens = Unknown::new(tokenizer);
        let (mut text_bytes, mut unknown) = (0, 0);
        let cuts = tokenizer.cuts();
        let mut chunks = corpus.chunks(cuts, division);
        loop {
            check(stop)?;
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
            let texts: Vec<&str> =
                batch.iter().map(|chunk| cuts.as_encoded(&chunk.text, chunk.starts)).collect();
            let ids = tokenizer.encode_batch(texts.clone())?;
            let counts = texts.par_iter().zip(&ids).map(|(text, ids)| unknown_tokens.count(text, ids));
            unknown += counts.sum::<Result<u64, DataError>>()?;
            for (chunk, ids) in batch.iter().zip(ids) {
                spellings.count(&chunk.text);
                text_bytes += chunk.text.len() as u64;
                let writer = match chunk.split {
                    Split::Train => &mut train,
                    Split::Validation => &mut validation,
                };
                if chunk.starts {
                    writer.write(start, 0)?;
                }
                writer.write(&ids, chunk.text.len())?;
                if chunk.ends {
                    writer.write(&[*end], 0)?;
                }
            }
            progress(Progress::Encoding {
                input_bytes: corpus.bytes,
                text_bytes,
                documents: chunks.documents,
                tokens: train.tokens() + validation.tokens(),
            });
        }
        let (documents, findings) = (chunks.documents, chunks.findings);
        Ok(Encoded { train, validation, documents, text_bytes, findings, unknown, spellings })
    }
}

const BUFFER_BYTES: usize = 1 << 20;

pub(super) struct SplitWriter {
    path: PathBuf,
    file: BufWriter<File>,
    width: TokenWidth,
    hasher: Sha256,
    blocks: BlockWriter,
    tokens: u64,
    text_bytes: u64,
    counts: Vec<u64>,
    bytes: Vec<u8>,
}

impl SplitWriter {
    pub(super) fn create(folder: &Path, split: Split, vocab_size: usize) -> Result<Self> {
        let path = folder.join(split.file_name());
        let file = File::create(&path).map_err(DataError::io("create", &path))?;
        Ok(Self {
            blocks: BlockWriter::create(folder.join(split.block_sums_name()))?,
            path,
            file: BufWriter::with_capacity(BUFFER_BYTES, file),
            width: TokenWidth::for_vocabulary(vocab_size),
            hasher: Sha256::new(),
            tokens: 0,
            text_bytes: 0,
            counts: vec![0; vocab_size],
            bytes: Vec::new(),
        })
    }

    /// Appends `ids`, which represent `text_bytes` bytes of text. Each id must be below the vocabulary size.
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

    pub(super) fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Writes everything to disk. Returns the split's entry for `data.json`, and the number of occurrences of each
    /// token.
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
