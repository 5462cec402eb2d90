//! Text to token ids and back.

use super::info::TOKENIZER_FILE;
use super::stream::{self, Stream};
use super::sums::read_small_file;
use super::{DataError, Result};
use kiln_storage::files::{self, MAX_WHOLE};
use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, Tokenizer as Inner};

/// The smallest vocabulary that can be trained: all bytes and the end of text.
pub const VOCABULARY_MINIMUM: usize = 257;

/// Ids are handed to the model as `i32`.
const VOCABULARY_MAXIMUM: usize = i32::MAX as usize;
/// A merge seen only once saves nothing.
const MERGE_FREQUENCY: u64 = 2;
/// Spellings of the end-of-text token, the one of trained tokenizers first.
const END_OF_TEXT: [&str; 4] = ["<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>"];

/// A tokenizer, trained here or loaded from a `tokenizer.json`.
///
/// The spelling of a special token inside a text is encoded as ordinary text: no
/// document can end itself. Encoding adds no tokens of its own.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    inner: Inner,
    vocab_size: usize,
}

impl Tokenizer {
    /// Trains a byte-level byte-pair encoding with the word boundaries of GPT-2. Every
    /// byte is a token, so any text can be encoded, and `<|endoftext|>` has id 0.
    ///
    /// The vocabulary stays smaller than `vocab_size` when the texts are so few that
    /// nothing is left to merge. The texts are read once, as a stream, and should be
    /// short: each is held several times over while its words are counted.
    ///
    /// # Errors
    ///
    /// The first error of `texts`, a vocabulary below [`VOCABULARY_MINIMUM`], or a failure of the training.
    pub fn train<I>(texts: I, vocab_size: usize) -> Result<Self>
    where
        I: Iterator<Item = Result<String>> + Send,
    {
        Self::check_size(vocab_size)?;
        let failed = |error: tokenizers::Error| DataError::TokenizerTraining { problem: error.to_string() };
        let byte_level = ByteLevel::new(false, true, true);
        let mut inner = Inner::new(BPE::default());
        inner
            .with_pre_tokenizer(Some(byte_level))
            .with_post_processor(Some(byte_level))
            .with_decoder(Some(byte_level));
        let trainer = BpeTrainer::builder()
            .show_progress(false)
            .min_frequency(MERGE_FREQUENCY)
            .vocab_size(vocab_size)
            .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
            .special_tokens(vec![AddedToken::from(END_OF_TEXT[0], true)])
            .build();

        // The library takes plain texts: the stream ends at an error, which is kept.
        let mut failure = None;
        let texts = texts
            .map_while(|text| match text {
                Ok(text) => Some(text),
                Err(error) => {
                    failure = Some(error);
                    None
                }
            })
            .fuse();
        inner.train(&mut TrainerWrapper::from(trainer), texts).map_err(failed)?;
        match failure {
            Some(error) => Err(error),
            None => Self::new(inner).map_err(|problem| DataError::TokenizerTraining { problem }),
        }
    }

    /// Reads a `tokenizer.json`. Truncation and padding set in the file are ignored.
    ///
    /// # Errors
    ///
    /// When the file is missing, cannot be read or is not a tokenizer.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        Self::from_file(read_file(path)?, path)
    }

    /// The tokenizer that the file `path` with this `content` is.
    pub fn from_file(content: Vec<u8>, path: &Path) -> Result<Self> {
        let unusable = |problem| DataError::TokenizerFile { path: path.to_path_buf(), problem };
        let mut inner = Inner::from_bytes(content).map_err(|error| unusable(error.to_string()))?;
        inner.with_truncation(None).map_err(|error| unusable(error.to_string()))?;
        inner.with_padding(None);
        Self::new(inner).map_err(unusable)
    }

    /// What is in it, whichever way its file was written.
    fn content(&self) -> Option<serde_json::Value> {
        serde_json::from_str(&self.inner.to_string(false).ok()?).ok()
    }

    /// Fails unless a vocabulary of `vocab_size` can be trained.
    pub(super) fn check_size(vocab_size: usize) -> Result<()> {
        if vocab_size < VOCABULARY_MINIMUM {
            return Err(DataError::VocabularyTooSmall { requested: vocab_size, minimum: VOCABULARY_MINIMUM });
        }
        if vocab_size > VOCABULARY_MAXIMUM {
            return Err(DataError::VocabularyTooLarge { requested: vocab_size, maximum: VOCABULARY_MAXIMUM });
        }
        Ok(())
    }

    fn new(mut inner: Inner) -> Result<Self, String> {
        inner.set_encode_special_tokens(true);
        // Ids may have gaps: the size is what the largest id asks for, not the count.
        let largest = inner.get_vocab(true).into_values().max();
        let vocab_size = largest.ok_or("its vocabulary is empty")? as usize + 1;
        if vocab_size > VOCABULARY_MAXIMUM {
            return Err(format!("token id {} is larger than ids may be", vocab_size - 1));
        }
        Ok(Self { inner, vocab_size })
    }

    /// Writes a `tokenizer.json` and waits until it is on the disk.
    ///
    /// # Errors
    ///
    /// When the file cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let content = self.inner.to_string(true).map_err(|error| DataError::TokenizerFile {
            path: path.to_path_buf(),
            problem: error.to_string(),
        })?;
        let mut file = fs::File::create(path).map_err(DataError::io("create", path))?;
        file.write_all(content.as_bytes())
            .and_then(|()| file.sync_all())
            .map_err(DataError::io("write", path))
    }

    /// The token ids of a text.
    ///
    /// # Errors
    ///
    /// When the tokenizer cannot express the text; a trained one always can.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.inner.encode_fast(text, false).map_err(encode_failed)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The token ids of each text, computed on all cores.
    ///
    /// # Errors
    ///
    /// As for [`Self::encode`].
    pub fn encode_batch(&self, texts: Vec<&str>) -> Result<Vec<Vec<u32>>> {
        let encodings = self.inner.encode_batch_fast(texts, false).map_err(encode_failed)?;
        Ok(encodings.iter().map(|encoding| encoding.get_ids().to_vec()).collect())
    }

    /// The text of token ids, special tokens included. Bytes that do not form a
    /// character, as at a cut, come out as U+FFFD; ids without a token are left out.
    ///
    /// # Errors
    ///
    /// When the decoder of a loaded tokenizer fails.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.inner.decode(ids, false).map_err(|error| DataError::Decode { problem: error.to_string() })
    }

    /// The spelling of token `id` in the vocabulary; `None` for an id without a token.
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The number of ids: one more than the largest id.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The id of the token that ends a document: of `<|endoftext|>`, `</s>`,
    /// `<|end_of_text|>` and `<eos>`, the first one in the vocabulary.
    ///
    /// # Errors
    ///
    /// When the vocabulary holds none of them.
    pub fn end_of_text(&self) -> Result<u32> {
        END_OF_TEXT
            .iter()
            .find_map(|token| self.inner.token_to_id(token))
            .ok_or_else(|| DataError::NoEndOfText { known: END_OF_TEXT.join(", ") })
    }
}

/// The content of a `tokenizer.json`.
fn read_file(path: &Path) -> Result<Vec<u8>> {
    if !path.try_exists().map_err(DataError::io("open", path))? {
        return Err(DataError::Missing { path: path.to_path_buf() });
    }
    files::read(path, MAX_WHOLE).map_err(DataError::io("read", path))
}

/// The content of a tokenizer that a user names. A pipe is waited for until `stop` becomes true.
pub(super) fn read_named_tokenizer(path: &Path, stop: &AtomicBool) -> Result<Vec<u8>> {
    if Stream::at(path).is_none() {
        return read_file(path);
    }
    let mut content = Vec::new();
    stream::copy_to_end(path, &mut content, MAX_WHOLE, stop)?;
    Ok(content)
}

/// The content of the tokenizer of a folder of prepared data.
///
/// # Errors
///
/// When there is none, when it cannot be read, and when it is not what was prepared.
pub fn read_tokenizer_of(folder: &Path) -> Result<Vec<u8>> {
    read_small_file(folder, TOKENIZER_FILE)
}

/// Whether two files are known to hold different tokenizers, given their contents. The same tokenizer
/// written by another program is not another one, and of a file that is none nothing is known.
pub fn are_other_tokenizers(a: &[u8], b: &[u8]) -> bool {
    if a == b {
        return false;
    }
    let content = |file: &[u8]| {
        let load = |file: Vec<u8>| Tokenizer::from_file(file, Path::new("")).ok()?.content();
        // Once more as it is written here, for what only a file of another program spells out.
        load(load(file.to_vec())?.to_string().into_bytes())
    };
    match (content(a), content(b)) {
        (Some(a), Some(b)) => a != b,
        _ => false,
    }
}

fn encode_failed(error: tokenizers::Error) -> DataError {
    DataError::Encode { problem: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::super::builtin::Builtin;
    use super::*;

    const TEXT: &str = "The cat sees the cat. The dog sees the cat.\n";

    fn trained(vocab_size: usize) -> Tokenizer {
        let texts = (0..40).map(|index| Ok(Builtin::Arithmetic.document(index)));
        Tokenizer::train(texts, vocab_size).unwrap()
    }

    #[test]
    fn any_text_survives_the_round_trip() {
        let tokenizer = trained(400);
        assert_eq!(tokenizer.vocab_size(), 400);
        let every_character: String = (0..0x3000).filter_map(char::from_u32).collect();
        for text in [
            "",
            " ",
            TEXT,
            "\r\n\t  x  \n\n",
            "12 + 7 = 19.",
            "ünïcödé 漢字 🙂👩‍👩‍👧 \u{FEFF}\u{0}",
            "a <|endoftext|> b",
            &every_character,
        ] {
            let ids = tokenizer.encode(text).unwrap();
            assert_eq!(tokenizer.decode(&ids).unwrap(), text);
            assert_eq!(tokenizer.encode_batch(vec![text]).unwrap(), [ids]);
        }
    }

    #[test]
    fn merges_shorten_text_and_no_text_yields_the_end() {
        let tokenizer = trained(600);
        assert!(tokenizer.encode(TEXT).unwrap().len() < TEXT.len() / 2);
        assert_eq!(tokenizer.end_of_text().unwrap(), 0);
        assert!(!tokenizer.encode("<|endoftext|>").unwrap().contains(&0));
        assert_eq!(tokenizer.decode(&[0]).unwrap(), "<|endoftext|>");
    }

    #[test]
    fn training_and_saving_are_reproducible() {
        let folder = tempfile::tempdir().unwrap();
        let (first, second) = (folder.path().join("a.json"), folder.path().join("b.json"));
        trained(400).save(&first).unwrap();
        trained(400).save(&second).unwrap();
        assert_eq!(fs::read(&first).unwrap(), fs::read(&second).unwrap());
        let loaded = Tokenizer::load(&first).unwrap();
        assert_eq!(loaded.vocab_size(), 400);
        assert_eq!(loaded.encode(TEXT).unwrap(), trained(400).encode(TEXT).unwrap());
        assert_eq!(loaded.end_of_text().unwrap(), 0);
        assert!(!loaded.encode("<|endoftext|>").unwrap().contains(&0));
    }

    #[test]
    fn tokenizers_differ_by_what_is_in_them() {
        let folder = tempfile::tempdir().unwrap();
        let file = |size: usize| {
            let path = folder.path().join("tokenizer.json");
            trained(size).save(&path).unwrap();
            fs::read(path).unwrap()
        };
        let (one, other) = (file(400), file(401));
        assert!(are_other_tokenizers(&one, &other));
        assert!(!are_other_tokenizers(&one, &one));
        // As another program writes it: in one line, and with padding, which is not used here.
        let mut again: serde_json::Value = serde_json::from_slice(&one).unwrap();
        again["padding"] = serde_json::json!({
            "strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": null,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"
        });
        let merges = again["model"]["merges"].as_array_mut().unwrap();
        for merge in merges.iter_mut().filter(|merge| merge.is_array()) {
            *merge = format!("{} {}", merge[0].as_str().unwrap(), merge[1].as_str().unwrap()).into();
        }
        assert!(!are_other_tokenizers(&one, again.to_string().as_bytes()));
        assert!(!are_other_tokenizers(&one, b"{}"));
    }

    #[test]
    fn bad_sizes_and_streams_are_refused() {
        for size in [0, 256] {
            let error = Tokenizer::train(std::iter::empty(), size).unwrap_err();
            assert!(matches!(error, DataError::VocabularyTooSmall { minimum: 257, .. }));
        }
        let texts = [Ok(TEXT.to_owned()), Err(DataError::NoInputs)];
        let error = Tokenizer::train(texts.into_iter(), 300).unwrap_err();
        assert!(matches!(error, DataError::NoInputs));
        // Too little text for the size asked for.
        assert_eq!(Tokenizer::train(std::iter::empty(), 300).unwrap().vocab_size(), 257);
    }

    #[test]
    fn bad_files_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        assert!(matches!(Tokenizer::load(&path), Err(DataError::Missing { .. })));
        fs::write(&path, "{}").unwrap();
        let error = Tokenizer::load(&path).unwrap_err().to_string();
        assert!(error.contains("tokenizer.json is not a usable tokenizer"), "{error}");
        let words = r#"{"version": "1.0", "added_tokens": [], "truncation": null, "padding": null,
            "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": null,
            "model": {"type": "WordLevel", "vocab": VOCAB, "unk_token": "a"}}"#;
        fs::write(&path, words.replace("VOCAB", r#"{"a": 0, "b": 7}"#)).unwrap();
        let gapped = Tokenizer::load(&path).unwrap();
        assert_eq!(gapped.vocab_size(), 8);
        let error = gapped.end_of_text().unwrap_err().to_string();
        assert!(error.contains("<|endoftext|>, </s>, <|end_of_text|>, <eos>"), "{error}");
        fs::write(&path, words.replace("VOCAB", "{}")).unwrap();
        let error = Tokenizer::load(&path).unwrap_err().to_string();
        assert!(error.contains("its vocabulary is empty"), "{error}");
    }
}
