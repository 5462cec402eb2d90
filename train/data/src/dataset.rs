use super::blocks::{BlockSums, Fault};
use super::info::Split;
use super::{DataError, DataInfo, Result, TokenWidth};
use kiln_sys::files;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

/// A token file, cut into samples of one sequence length. Threads may share it.
///
/// Samples are read on demand, without a memory map, so a truncated file is an error and not a fatal signal. If the
/// folder has block checksums, each block is compared with its checksum before its first sample is returned.
#[derive(Debug)]
pub struct TokenFile {
    path: PathBuf,
    split: Split,
    info: DataInfo,
    file: File,
    blocks: Option<BlockSums>,
    seq_len: usize,
    num_samples: u64,
}

impl TokenFile {
    /// Opens the token file of a split, for samples of `seq_len` tokens.
    ///
    /// # Errors
    ///
    /// If a file is missing or unusable, or the token file has another size than in `data.json` or less than one
    /// sample.
    pub fn open(folder: impl AsRef<Path>, split: Split, seq_len: usize) -> Result<Self> {
        let folder = folder.as_ref();
        if seq_len == 0 {
            return Err(DataError::ZeroSequenceLength);
        }
        let info = DataInfo::load(folder)?;
        let path = folder.join(split.file_name());
        if !path.try_exists().map_err(DataError::io("open", &path))? {
            let file = split.file_name();
            return Err(DataError::NotPrepared { folder: folder.to_path_buf(), file });
        }
        let file = files::open(&path).map_err(DataError::io("open", &path))?;
        let actual = file.metadata().map_err(DataError::io("read the size of", &path))?.len();
        let tokens = info.split(split).tokens;
        let expected = tokens.saturating_mul(info.dtype.bytes() as u64);
        if actual != expected {
            return Err(DataError::FileSize { path, tokens, expected, actual });
        }
        let num_samples = tokens.saturating_sub(1) / seq_len as u64;
        if num_samples == 0 {
            return Err(DataError::TooFewTokens { path, tokens, seq_len: seq_len as u64 });
        }
        let sums = |block| BlockSums::open(folder.join(split.block_sums_name()), block, actual);
        let blocks = info.split(split).block_bytes.map(sums).transpose()?;
        Ok(Self { path, split, info, file, blocks, seq_len, num_samples })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the number of samples: `(tokens - 1) / seq_len`.
    pub fn num_samples(&self) -> u64 {
        self.num_samples
    }

    /// Returns the number of input tokens, or of target tokens, of a sample.
    pub fn seq_len(&self) -> usize {
        self.seq_len
    }

    /// Returns the content of the folder's `data.json`.
    pub fn info(&self) -> &DataInfo {
        &self.info
    }

    /// Appends the tokens `sample * seq_len ..= (sample + 1) * seq_len` to `inputs` (without the last) and to `targets`
    /// (without the first).
    ///
    /// # Errors
    ///
    /// If the sample does not exist, cannot be read, or is invalid. `inputs` and `targets` are then unchanged.
    pub fn read_sample(&self, sample: u64, inputs: &mut Vec<i32>, targets: &mut Vec<i32>) -> Result<()> {
        if sample >= self.num_samples {
            return Err(DataError::SampleOutOfRange {
                path: self.path.clone(),
                sample,
                samples: self.num_samples,
            });
        }
        let length = inputs.len();
        // The sample was within the file when it was opened, so nothing overflows.
        self.read_tokens(sample * self.seq_len as u64, self.seq_len + 1, sample, inputs)?;
        targets.extend_from_slice(&inputs[length + 1..]);
        inputs.truncate(length + self.seq_len);
        Ok(())
    }

    /// Appends `count` tokens from `start` to `tokens`, as part of sample `sample`.
    pub(super) fn read_tokens(
        &self,
        start: u64,
        count: usize,
        sample: u64,
        tokens: &mut Vec<i32>,
    ) -> Result<()> {
        let width = self.info.dtype.bytes();
        let mut bytes = vec![0; count * width];
        if let Some(blocks) = &self.blocks {
            let place = start * width as u64..start * width as u64 + bytes.len() as u64;
            blocks.confirm(&self.file, place).map_err(|fault| self.error_from(sample, fault))?;
        }
        self.file
            .read_exact_at(&mut bytes, start * width as u64)
            .map_err(|error| self.unreadable(sample, error))?;
        let length = tokens.len();
        match self.info.dtype {
            TokenWidth::U16 => {
                tokens.extend(bytes.as_chunks().0.iter().map(|&token| i32::from(u16::from_le_bytes(token))))
            }
            // An id beyond `i32` becomes negative, which the check below rejects.
            TokenWidth::U32 => {
                tokens.extend(bytes.as_chunks().0.iter().map(|&token| i32::from_le_bytes(token)));
            }
        }
        // As unsigned numbers, negative ids are outside every vocabulary.
        let vocab_size = self.info.vocab_size;
        let outside = |&token: &i32| token as u32 as usize >= vocab_size;
        if let Some(offset) = tokens[length..].iter().position(outside) {
            let id = tokens[length + offset] as u32;
            tokens.truncate(length);
            return Err(DataError::TokenOutOfRange {
                path: self.path.clone(),
                position: start + offset as u64,
                id,
                vocab_size,
            });
        }
        Ok(())
    }

    /// Compares a few of the file's blocks with their checksums, if the folder has any.
    ///
    /// # Errors
    ///
    /// If a block differs from its checksum, or the file or its checksums cannot be read.
    pub fn check(&self) -> Result<()> {
        match &self.blocks {
            Some(blocks) => blocks.confirm_some(&self.file).map_err(|fault| self.error_from(0, fault)),
            None => Ok(()),
        }
    }

    fn error_from(&self, sample: u64, fault: Fault) -> DataError {
        let width = self.info.dtype.bytes() as u64;
        match fault {
            Fault::Changed(bytes) => DataError::ChangedTokens {
                path: self.path.clone(),
                first: bytes.start / width,
                last: bytes.end / width - 1,
            },
            Fault::Tokens(error) => self.unreadable(sample, error),
            Fault::Sums(error) => error,
        }
    }

    fn unreadable(&self, sample: u64, error: io::Error) -> DataError {
        if error.kind() != io::ErrorKind::UnexpectedEof {
            return DataError::io("read", &self.path)(error);
        }
        let tokens = self.info.split(self.split).tokens;
        DataError::Truncated {
            path: self.path.clone(),
            sample,
            expected: tokens * self.info.dtype.bytes() as u64,
            actual: self.file.metadata().map_or(0, |metadata| metadata.len()),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::{FORMAT_VERSION, SplitInfo, verify};
    use super::*;
    use sha2::{Digest, Sha256};
    use std::fs;
    use tempfile::TempDir;

    pub(crate) fn folder(dtype: TokenWidth, tokens: u64, vocab_size: usize) -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        let bytes: Vec<u8> =
            (0..tokens as u32).flat_map(|token| token.to_le_bytes()[..dtype.bytes()].to_vec()).collect();
        let split = SplitInfo { tokens, text_bytes: None, sha256: None, block_bytes: None };
        let info = DataInfo {
            format_version: FORMAT_VERSION,
            dtype,
            vocab_size,
            end_of_text: 0,
            train: SplitInfo { sha256: Some(format!("{:x}", Sha256::digest(&bytes))), ..split.clone() },
            validation: split,
            documents: 0,
            skipped_files: 0,
            unknown: 0,
            unigram_entropy: None,
            source: None,
            chat: None,
        };
        info.save(folder.path()).unwrap();
        fs::write(folder.path().join("train.bin"), &bytes).unwrap();
        fs::write(folder.path().join("val.bin"), &bytes).unwrap();
        folder
    }

    fn problems(folder: &Path) -> String {
        let found = verify(folder, &mut |_, _| {}).unwrap();
        found.problems.iter().map(|problem| format!("{problem}\n")).collect()
    }

    #[test]
    fn samples_shift_by_one_and_share_a_token() {
        for dtype in [TokenWidth::U16, TokenWidth::U32] {
            let folder = folder(dtype, 300, 300);
            let file = TokenFile::open(folder.path(), Split::Train, 8).unwrap();
            assert_eq!((file.num_samples(), file.seq_len()), (37, 8));
            let (mut inputs, mut targets) = (vec![-1], vec![-1]);
            file.read_sample(0, &mut inputs, &mut targets).unwrap();
            file.read_sample(36, &mut inputs, &mut targets).unwrap();
            let expected = |shift| [-1].into_iter().chain(shift..8 + shift).chain(288 + shift..296 + shift);
            assert!(inputs.iter().copied().eq(expected(0)));
            assert!(targets.iter().copied().eq(expected(1)));
            let error = file.read_sample(37, &mut inputs, &mut targets).unwrap_err().to_string();
            assert!(error.ends_with("has 37 samples, so there is no sample 37; the last one is 36"));
        }
    }

    #[test]
    fn sample_count_at_the_edges() {
        let samples = |tokens, seq_len| {
            let folder = folder(TokenWidth::U16, tokens, 300);
            TokenFile::open(folder.path(), Split::Validation, seq_len).map(|file| file.num_samples())
        };
        assert_eq!(samples(9, 8).unwrap(), 1);
        assert_eq!(samples(16, 8).unwrap(), 1);
        assert_eq!(samples(17, 8).unwrap(), 2);
        let error = samples(8, 8).unwrap_err().to_string();
        assert!(error.contains("has 8 tokens, and one sample with data.seq_len = 8 needs 9"));
        assert!(matches!(samples(0, 8), Err(DataError::TooFewTokens { tokens: 0, .. })));
        assert!(matches!(samples(9, 0), Err(DataError::ZeroSequenceLength)));
        assert!(matches!(samples(9, usize::MAX), Err(DataError::TooFewTokens { .. })));
    }

    #[test]
    fn tokens_outside_the_vocabulary_are_located() {
        for dtype in [TokenWidth::U16, TokenWidth::U32] {
            let folder = folder(dtype, 40, 30);
            let file = TokenFile::open(folder.path(), Split::Train, 8).unwrap();
            let (mut inputs, mut targets) = (vec![], vec![]);
            file.read_sample(2, &mut inputs, &mut targets).unwrap();
            let error = file.read_sample(3, &mut inputs, &mut targets).unwrap_err().to_string();
            assert!(error.contains("token 30 is 30, outside the vocabulary of 30"), "{error}");
            assert_eq!((inputs.len(), targets.len()), (8, 8));
        }
        let folder = folder(TokenWidth::U32, 9, 30);
        fs::write(folder.path().join("train.bin"), [0xFF; 36]).unwrap();
        let file = TokenFile::open(folder.path(), Split::Train, 8).unwrap();
        let error = file.read_sample(0, &mut vec![], &mut vec![]).unwrap_err();
        assert!(matches!(error, DataError::TokenOutOfRange { id: u32::MAX, .. }));
    }

    #[test]
    fn truncating_an_open_file_is_an_error() {
        let folder = folder(TokenWidth::U16, 100, 300);
        let file = TokenFile::open(folder.path(), Split::Train, 8).unwrap();
        let written = File::options().write(true).open(folder.path().join("train.bin")).unwrap();
        written.set_len(40).unwrap();
        let (mut inputs, mut targets) = (vec![], vec![]);
        file.read_sample(1, &mut inputs, &mut targets).unwrap();
        let error = file.read_sample(2, &mut inputs, &mut targets).unwrap_err();
        assert_eq!((inputs.len(), targets.len()), (8, 8));
        let DataError::Truncated { sample: 2, expected: 200, actual: 40, .. } = error else {
            panic!("{error:?}");
        };
        assert!(error.to_string().contains("train.bin became shorter"), "{error}");
        assert!(problems(folder.path()).contains("train.bin: it has 40 bytes, not 200\n"));
    }

    #[test]
    fn damage_is_found() {
        let folder = folder(TokenWidth::U16, 100, 300);
        let open = |split| TokenFile::open(folder.path(), split, 8);
        let whole = verify(folder.path(), &mut |_, _| {}).unwrap();
        assert_eq!((whole.files, whole.bytes), (1, 200));
        assert!(whole.unproven.contains(&"val.bin"), "{whole:?}");
        assert!(!problems(folder.path()).contains("train.bin"));
        let path = folder.path().join("train.bin");
        let mut bytes = fs::read(&path).unwrap();
        bytes[50] ^= 1;
        fs::write(&path, &bytes).unwrap();
        let damaged = "train.bin: its SHA-256 differs from the one in data.json\n";
        assert!(problems(folder.path()).contains(damaged));
        fs::write(&path, &bytes[..151]).unwrap();
        let error = open(Split::Train).unwrap_err().to_string();
        assert!(error.contains("has 151 bytes, but data.json states 100 tokens, which take 200"));
        fs::remove_file(&path).unwrap();
        let missing = open(Split::Train);
        assert!(matches!(missing, Err(DataError::NotPrepared { file: "train.bin", .. })));
    }
}
