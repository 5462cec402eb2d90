//! Writing one token file.

use super::blocks::{BLOCK_BYTES, BlockWriter};
use super::{DataError, Result, Split, SplitInfo, TokenWidth};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};

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
