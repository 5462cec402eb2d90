//! CRC-64/NVME checksums of the blocks of a token file, as consecutive little-endian values of eight bytes.

use super::{DataError, Result};
use kiln_sys::{Checksum, RunningChecksum, files};
use std::fs::File;
use std::io::{self, BufWriter, Write as _};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of a token file covered by one checksum. Reading one block takes tens of microseconds.
pub(super) const BLOCK_BYTES: u64 = 1 << 16;

/// Maximum number of blocks checked when a run starts.
const SAMPLED: u64 = 16;

const SUM_BYTES: u64 = 8;

pub(super) struct BlockWriter {
    path: PathBuf,
    file: BufWriter<File>,
    running: RunningChecksum,
    filled: u64,
}

impl BlockWriter {
    pub(super) fn create(path: PathBuf) -> Result<Self> {
        let file = File::create(&path).map_err(DataError::io("create", &path))?;
        Ok(Self { path, file: BufWriter::new(file), running: RunningChecksum::default(), filled: 0 })
    }

    pub(super) fn update(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let room = usize::try_from(BLOCK_BYTES - self.filled).unwrap_or(usize::MAX);
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            self.running.update(now);
            self.filled += now.len() as u64;
            bytes = later;
            if self.filled == BLOCK_BYTES {
                self.close()?;
            }
        }
        Ok(())
    }

    pub(super) fn finish(mut self) -> Result<()> {
        if self.filled > 0 {
            self.close()?;
        }
        self.file
            .into_inner()
            .map_err(|error| error.into_error())
            .and_then(|file| file.sync_all())
            .map_err(DataError::io("write", &self.path))
    }

    fn close(&mut self) -> Result<()> {
        let sum = self.running.finish().to_bits();
        self.running = RunningChecksum::default();
        self.filled = 0;
        self.file.write_all(&sum.to_le_bytes()).map_err(DataError::io("write", &self.path))
    }
}

#[derive(Debug)]
pub(super) enum Fault {
    Changed(Range<u64>),
    Tokens(io::Error),
    Sums(DataError),
}

/// The block checksums of one token file, and which blocks have been verified. Threads may share it.
#[derive(Debug)]
pub(super) struct BlockSums {
    path: PathBuf,
    file: File,
    block_bytes: u64,
    bytes: u64,
    /// One bit per block, set once the block is verified.
    confirmed: Vec<AtomicU64>,
}

impl BlockSums {
    /// Opens the checksums in the file `path`, for a token file of `bytes` bytes. Fails if their number does not match.
    pub(super) fn open(path: PathBuf, block_bytes: u64, bytes: u64) -> Result<Self> {
        let file = match files::open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(DataError::BlockSums { path, problem: "it is missing".to_owned() });
            }
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                return Err(DataError::BlockSums { path, problem: error.to_string() });
            }
            file => file.map_err(DataError::io("open", &path))?,
        };
        let actual = file.metadata().map_err(DataError::io("read the size of", &path))?.len();
        let blocks = bytes.div_ceil(block_bytes);
        let expected = blocks * SUM_BYTES;
        if actual != expected {
            let problem = format!("it has {actual} bytes, not {expected}");
            return Err(DataError::BlockSums { path, problem });
        }
        let words = blocks.div_ceil(u64::from(u64::BITS));
        let confirmed = (0..words).map(|_| AtomicU64::new(0)).collect();
        Ok(Self { path, file, block_bytes, bytes, confirmed })
    }

    pub(super) fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    pub(super) fn blocks(&self) -> u64 {
        self.bytes.div_ceil(self.block_bytes)
    }

    /// Compares the blocks that contain `bytes` of the token file with their checksums. Skips verified blocks.
    pub(super) fn confirm(&self, tokens: &File, bytes: Range<u64>) -> Result<(), Fault> {
        if bytes.is_empty() {
            return Ok(());
        }
        let blocks = bytes.start / self.block_bytes..=(bytes.end - 1) / self.block_bytes;
        blocks.into_iter().try_for_each(|block| self.confirm_block(tokens, block))
    }

    /// Runs [`Self::confirm`] on up to [`SAMPLED`] blocks spread over the file.
    pub(super) fn confirm_some(&self, tokens: &File) -> Result<(), Fault> {
        let blocks = self.blocks();
        let count = blocks.min(SAMPLED);
        (0..count).try_for_each(|index| self.confirm_block(tokens, index * (blocks - 1) / (count - 1).max(1)))
    }

    fn confirm_block(&self, tokens: &File, block: u64) -> Result<(), Fault> {
        let bit = 1 << (block % u64::from(u64::BITS));
        let word = &self.confirmed[(block / u64::from(u64::BITS)) as usize];
        // Relaxed ordering is enough: at worst, two threads read the same block.
        if word.load(Ordering::Relaxed) & bit != 0 {
            return Ok(());
        }
        let start = block * self.block_bytes;
        let range = start..(start + self.block_bytes).min(self.bytes);
        let mut content = vec![0; (range.end - range.start) as usize];
        tokens.read_exact_at(&mut content, start).map_err(Fault::Tokens)?;
        if Checksum::of(&content) != self.checksum(block).map_err(Fault::Sums)? {
            return Err(Fault::Changed(range));
        }
        word.fetch_or(bit, Ordering::Relaxed);
        Ok(())
    }

    pub(super) fn checksum(&self, block: u64) -> Result<Checksum> {
        let mut sum = [0; SUM_BYTES as usize];
        self.file.read_exact_at(&mut sum, block * SUM_BYTES).map_err(DataError::io("read", &self.path))?;
        Ok(Checksum::from_bits(u64::from_le_bytes(sum)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::Path;

    const BLOCK: usize = BLOCK_BYTES as usize;

    fn written(folder: &Path, length: usize, chunk: usize) -> (PathBuf, Vec<u8>, BlockSums) {
        let bytes: Vec<u8> = (0..length as u64).map(|at| (at * at % 251) as u8).collect();
        let (path, sums) = (folder.join("tokens"), folder.join("sums"));
        fs::write(&path, &bytes).unwrap();
        let mut writer = BlockWriter::create(sums.clone()).unwrap();
        bytes.chunks(chunk).for_each(|chunk| writer.update(chunk).unwrap());
        writer.finish().unwrap();
        (path, bytes, BlockSums::open(sums, BLOCK_BYTES, length as u64).unwrap())
    }

    #[test]
    fn checksums_do_not_depend_on_write_sizes() {
        let folder = tempfile::tempdir().unwrap();
        for (length, chunk) in [(1, 1), (BLOCK, 1000), (BLOCK + 1, 7), (3 * BLOCK - 1, 2 * BLOCK)] {
            let (_, bytes, sums) = written(folder.path(), length, chunk);
            assert_eq!(sums.blocks(), length.div_ceil(BLOCK) as u64);
            for (index, block) in bytes.chunks(BLOCK).enumerate() {
                assert_eq!(sums.checksum(index as u64).unwrap(), Checksum::of(block), "{length}");
            }
        }
    }

    #[test]
    fn changed_blocks_are_found_unless_confirmed() {
        let folder = tempfile::tempdir().unwrap();
        let (path, mut bytes, sums) = written(folder.path(), 3 * BLOCK + 10, 1 << 20);
        let file = File::open(&path).unwrap();
        sums.confirm(&file, 5..6).unwrap();
        for at in [0, 2 * BLOCK + 7, 3 * BLOCK + 9] {
            bytes[at] ^= 1;
        }
        fs::write(&path, &bytes).unwrap();
        let block = BLOCK_BYTES;
        let changed = |range: Range<u64>| match sums.confirm(&file, range) {
            Ok(()) => None,
            Err(Fault::Changed(range)) => Some(range),
            Err(other) => panic!("{other:?}"),
        };
        // The block was verified before it changed.
        assert_eq!(changed(0..block), None);
        assert_eq!(changed(0..2 * block), None);
        assert_eq!(changed(0..2 * block + 1), Some(2 * block..3 * block));
        assert_eq!(changed(3 * block..3 * block + 1), Some(3 * block..3 * block + 10));
        assert_eq!(changed(3 * block..3 * block), None);
        assert!(matches!(sums.confirm_some(&file), Err(Fault::Changed(range)) if range.start == 2 * block));
        File::options().write(true).open(&path).unwrap().set_len(3 * block).unwrap();
        let gone = sums.confirm(&file, 3 * block..3 * block + 1);
        assert!(matches!(gone, Err(Fault::Tokens(_))), "{gone:?}");
    }

    #[test]
    fn at_most_sixteen_blocks_are_sampled() {
        let folder = tempfile::tempdir().unwrap();
        for blocks in [1, 2, 15, 16, 17, 100] {
            let (path, _, sums) = written(folder.path(), blocks * BLOCK, 1 << 20);
            sums.confirm_some(&File::open(&path).unwrap()).unwrap();
            let is_set =
                |block: usize| sums.confirmed[block / 64].load(Ordering::Relaxed) >> (block % 64) & 1 == 1;
            let set = (0..blocks).filter(|&block| is_set(block)).count();
            assert_eq!(set, blocks.min(16));
            assert!(is_set(0) && is_set(blocks - 1));
        }
    }

    #[test]
    fn checksums_of_another_file_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let (_, _, sums) = written(folder.path(), BLOCK, BLOCK);
        let open = |bytes| BlockSums::open(sums.path.clone(), BLOCK_BYTES, bytes);
        let error = open(BLOCK_BYTES + 1).unwrap_err().to_string();
        assert!(error.contains("sums: it has 8 bytes, not 16"), "{error}");
        fs::remove_file(&sums.path).unwrap();
        let error = open(BLOCK_BYTES).unwrap_err().to_string();
        assert!(error.contains("sums: it is missing"), "{error}");
    }
}
