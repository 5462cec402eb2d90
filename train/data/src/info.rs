//! `data.json`: the description of a folder of prepared data.

use super::sums::{read_small_file, write_small_file};
use super::{DataError, Result};
use kiln_sys::files::{self, MAX_WHOLE};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The version of the folder format that this build reads and writes.
pub const FORMAT_VERSION: u64 = 1;

pub(super) const INFO_FILE: &str = "data.json";
pub(super) const TOKENIZER_FILE: &str = "tokenizer.json";

/// One of the two parts of prepared data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Split {
    /// The data that the model learns from.
    Train,
    /// The data that the model is evaluated on.
    Validation,
}

impl Split {
    /// Returns the name of the split's token file.
    pub fn file_name(self) -> &'static str {
        match self {
            Self::Train => "train.bin",
            Self::Validation => "val.bin",
        }
    }

    /// Returns the name of the split in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Train => "the training split",
            Self::Validation => "the validation split",
        }
    }

    /// Returns the name of the file with the tokens that count, if the data are conversations.
    pub(super) fn turns_name(self) -> &'static str {
        match self {
            Self::Train => "train.turns",
            Self::Validation => "val.turns",
        }
    }

    pub(super) fn block_sums_name(self) -> &'static str {
        match self {
            Self::Train => "train.crc",
            Self::Validation => "val.crc",
        }
    }
}

/// The content of `data.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DataInfo {
    /// [`FORMAT_VERSION`] of the build that wrote the folder.
    pub format_version: u64,
    /// Width of a token id in the token files.
    pub dtype: TokenWidth,
    /// Number of token ids; every id in the files is smaller.
    pub vocab_size: usize,
    /// The id that ends a document.
    pub end_of_text: u32,
    /// The training split, in `train.bin`.
    pub train: SplitInfo,
    /// The validation split, in `val.bin`.
    pub validation: SplitInfo,
    /// Documents in both splits together.
    #[serde(default)]
    pub documents: u64,
    /// Files skipped because they are not UTF-8 text.
    #[serde(default)]
    pub skipped_files: u64,
    /// Number of unknown tokens, or of characters omitted because the tokenizer has no unknown token.
    #[serde(default)]
    pub unknown: u64,
    /// Loss of predicting from token counts alone, a baseline for the validation loss.
    #[serde(default)]
    pub unigram_entropy: Option<UnigramEntropy>,
    /// The program's own source of the samples, if there are no token files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<SourceInfo>,
    /// Present if the token files have conversations, of which only the assistant's tokens count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chat: Option<ChatInfo>,
}

/// The description of conversations in `data.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChatInfo {
    /// Numbers of training and validation tokens that count.
    pub counting: [u64; 2],
}

/// The description of a source in `data.json`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SourceInfo {
    /// The name under which the program registers the source.
    pub name: String,
    /// Settings of the source: `[data.extra]`.
    #[serde(default)]
    pub extra: serde_json::Map<String, serde_json::Value>,
    /// Tokens per sample when the folder was written.
    #[serde(default)]
    pub seq_len: usize,
    /// Numbers of training and validation samples; `None` if they are endless.
    #[serde(default)]
    pub samples: [Option<u64>; 2],
    /// SHA-256 of `tokenizer.json`, in hexadecimal.
    #[serde(default)]
    pub tokenizer: String,
}

/// One split of the data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SplitInfo {
    /// Number of tokens.
    pub tokens: u64,
    /// Bytes of text that the tokens represent, to convert a loss to bits per byte.
    #[serde(default)]
    pub text_bytes: Option<u64>,
    /// SHA-256 of the token file, in hexadecimal.
    #[serde(default)]
    pub sha256: Option<String>,
    /// Bytes of the token file covered by each checksum in `train.crc` or `val.crc`, if that file exists.
    #[serde(default)]
    pub block_bytes: Option<u64>,
}

const BLOCK_SIZES: std::ops::RangeInclusive<u64> = 1 << 12..=1 << 24;

/// Entropy figures of single tokens, in nats per token.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct UnigramEntropy {
    /// Validation loss of a model that ignores context: cross-entropy under the token frequencies of the training
    /// split, with one added to every count.
    pub validation_under_train: f64,
    /// Entropy of the token frequencies of the validation split itself.
    pub validation: f64,
}

/// Width of a token id on disk; always little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TokenWidth {
    /// Two bytes, for vocabularies up to 65,536.
    U16,
    /// Four bytes.
    U32,
}

impl TokenWidth {
    /// Returns the narrowest width that holds every id of the vocabulary.
    pub fn for_vocabulary(vocab_size: usize) -> Self {
        if vocab_size <= 1 << 16 { Self::U16 } else { Self::U32 }
    }

    /// Returns the number of bytes per token.
    pub fn bytes(self) -> usize {
        match self {
            Self::U16 => 2,
            Self::U32 => 4,
        }
    }
}

#[derive(Deserialize)]
#[serde(expecting = "an object with the key `format_version`")]
struct Version {
    format_version: u64,
}

impl DataInfo {
    /// Reads and validates the `data.json` of a folder.
    ///
    /// # Errors
    ///
    /// If the file is missing, unreadable, invalid, of another format version, or changed since it was prepared.
    pub fn load(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        if !folder.try_exists().map_err(DataError::io("open", folder))? {
            return Err(DataError::NoFolder { path: folder.to_path_buf() });
        }
        Self::parse(folder.join(INFO_FILE), &read_small_file(folder, INFO_FILE)?)
    }

    pub(super) fn load_unproven(folder: &Path) -> Result<Self> {
        let path = folder.join(INFO_FILE);
        if !path.try_exists().map_err(DataError::io("open", &path))? {
            return Err(DataError::NotPrepared { folder: folder.to_path_buf(), file: INFO_FILE });
        }
        let content = files::read(&path, MAX_WHOLE).map_err(DataError::io("read", &path))?;
        Self::parse(path, &content)
    }

    fn parse(path: PathBuf, content: &[u8]) -> Result<Self> {
        let bad = |problem| DataError::Info { path: path.clone(), problem };
        let version: Version = serde_json::from_slice(content).map_err(|error| bad(error.to_string()))?;
        if version.format_version != FORMAT_VERSION {
            return Err(DataError::Version {
                path,
                found: version.format_version,
                supported: FORMAT_VERSION,
            });
        }
        let info: Self = serde_json::from_slice(content).map_err(|error| bad(error.to_string()))?;
        info.check().map_err(bad)?;
        Ok(info)
    }

    pub(super) fn save(&self, folder: &Path) -> Result<()> {
        write_small_file(folder, INFO_FILE, self)
    }

    /// Returns the description of one split.
    pub fn split(&self, split: Split) -> &SplitInfo {
        match split {
            Split::Train => &self.train,
            Split::Validation => &self.validation,
        }
    }

    pub(super) fn check(&self) -> Result<(), String> {
        let Self { vocab_size, end_of_text, dtype, .. } = *self;
        if vocab_size == 0 {
            return Err("`vocab_size` is 0; it must be the number of token ids".to_owned());
        }
        if vocab_size > i32::MAX as usize {
            return Err(format!("`vocab_size` is {vocab_size}; the most is {}", i32::MAX));
        }
        if end_of_text as usize >= vocab_size {
            return Err(format!("`end_of_text` is {end_of_text}, outside the `vocab_size` of {vocab_size}"));
        }
        if dtype == TokenWidth::U16 && TokenWidth::for_vocabulary(vocab_size) != dtype {
            return Err(format!("`dtype` is u16, too narrow for the `vocab_size` of {vocab_size}"));
        }
        for block in [&self.train, &self.validation].into_iter().filter_map(|s| s.block_bytes) {
            if !block.is_power_of_two() || !BLOCK_SIZES.contains(&block) {
                return Err(format!(
                    "`block_bytes` is {block}; it must be a power of two from {} to {}",
                    BLOCK_SIZES.start(),
                    BLOCK_SIZES.end()
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn load(content: &str) -> Result<DataInfo, DataError> {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(INFO_FILE), content).unwrap();
        DataInfo::load(folder.path())
    }

    const MINIMAL: &str = r#"{"format_version": 1, "dtype": "u16", "vocab_size": 300,
        "end_of_text": 0, "train": {"tokens": 5}, "validation": {"tokens": 4}}"#;

    #[test]
    fn minimal_info_survives_saving() {
        let mut info = load(MINIMAL).unwrap();
        assert_eq!((info.dtype, info.split(Split::Validation).tokens), (TokenWidth::U16, 4));
        info.unigram_entropy =
            Some(UnigramEntropy { validation_under_train: 5.123_456_789, validation: 4.9 });
        info.train.sha256 = Some("ab".to_owned());
        let folder = tempfile::tempdir().unwrap();
        info.save(folder.path()).unwrap();
        assert_eq!(DataInfo::load(folder.path()).unwrap(), info);
    }

    #[test]
    fn mistakes_are_named() {
        let message = |from, to| load(&MINIMAL.replace(from, to)).unwrap_err().to_string();
        for (from, to, expected) in [
            ("}}", "}", "EOF while parsing"),
            ("\"vocab_size\": 300,", "", "missing field `vocab_size`"),
            ("300", "0", "`vocab_size` is 0"),
            ("300", "3000000000", "`vocab_size` is 3000000000"),
            ("300", "65537", "`dtype` is u16, too narrow"),
            ("\"end_of_text\": 0", "\"end_of_text\": 300", "`end_of_text` is 300"),
            ("\"tokens\": 5", "\"tokens\": 5, \"block_bytes\": 0", "`block_bytes` is 0; it must"),
            ("\"tokens\": 5", "\"tokens\": 5, \"block_bytes\": 6000", "from 4096 to 16777216"),
            ("u16", "u8", "unknown variant `u8`, expected `u16` or `u32`"),
            ("\"format_version\": 1", "\"format_version\": 2", "`format_version` is 2"),
        ] {
            let message = message(from, to);
            assert!(message.contains(expected) && message.contains("data.json"), "{message}");
        }
    }

    #[test]
    fn missing_folders_and_files_differ() {
        let folder = tempfile::tempdir().unwrap();
        let missing = DataInfo::load(folder.path().join("none"));
        assert!(matches!(missing, Err(DataError::NoFolder { .. })));
        let empty = DataInfo::load(folder.path());
        assert!(matches!(empty, Err(DataError::NotPrepared { file: "data.json", .. })));
    }

    #[test]
    fn width_follows_the_vocabulary() {
        assert_eq!(TokenWidth::for_vocabulary(65_536), TokenWidth::U16);
        assert_eq!(TokenWidth::for_vocabulary(65_537), TokenWidth::U32);
    }
}
