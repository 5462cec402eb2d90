//! Writing one token file.

use super::blocks::{BLOCK_BYTES, BlockWriter};
use super::{DataError, Result, Split, SplitInfo, TokenWidth};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{self, BufWriter, Read as _, Write as _};
use std::path::{Path, PathBuf};

/// Bytes of a token file that are read or written at a time.
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

    /// Opens the token file of `split` in `folder`, as left by a preparation that ended early, after its
    /// first `tokens` tokens; any further content is truncated. `None` if the file has fewer tokens.
    pub(super) fn reopen(
        folder: &Path,
        split: Split,
        vocab_size: usize,
        tokens: u64,
    ) -> Result<Option<Self>> {
        let path = folder.join(split.file_name());
        let opened = File::options().read(true).write(true).open(&path);
        let mut file = match opened {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file.map_err(DataError::io("open", &path))?,
        };
        let width = TokenWidth::of_vocabulary(vocab_size);
        let bytes = tokens.saturating_mul(width.bytes() as u64);
        if file.metadata().map_err(DataError::io("read the size of", &path))?.len() < bytes {
            return Ok(None);
        }
        file.set_len(bytes).map_err(DataError::io("write", &path))?;
        let mut counts = vec![0; vocab_size];
        let (mut hasher, mut blocks) =
            (Sha256::new(), BlockWriter::create(folder.join(split.block_sums_name()))?);
        let mut block = vec![0; BUFFER_BYTES];
        let mut left = bytes;
        while left > 0 {
            let now = usize::try_from(left).unwrap_or(usize::MAX).min(BUFFER_BYTES);
            let now = &mut block[..now];
            file.read_exact(now).map_err(DataError::io("read", &path))?;
            for id in now.chunks_exact(width.bytes()) {
                let id = id.iter().rev().fold(0, |id, byte| id << 8 | usize::from(*byte));
                let Some(count) = counts.get_mut(id) else { return Ok(None) };
                *count += 1;
            }
            hasher.update(&*now);
            blocks.update(now)?;
            left -= now.len() as u64;
        }
        let file = BufWriter::with_capacity(BUFFER_BYTES, file);
        let (text_bytes, bytes) = (0, Vec::new());
        Ok(Some(Self { path, file, width, hasher, blocks, tokens, text_bytes, counts, bytes }))
    }

    /// Writes the tokens so far to disk.
    pub(super) fn sync(&mut self) -> Result<()> {
        self.file
            .flush()
            .and_then(|()| self.file.get_ref().sync_data())
            .map_err(DataError::io("write", &self.path))
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

    /// Counts `bytes` bytes of text whose tokens are already in the file.
    pub(super) fn count_text(&mut self, bytes: usize) {
        self.text_bytes += bytes as u64;
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
