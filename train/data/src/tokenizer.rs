use super::cut::Cuts;
use super::info::TOKENIZER_FILE;
use super::stream::{self, Stream};
use super::sums::read_small_file;
use super::{DataError, Result};
use kiln_sys::files::{self, MAX_WHOLE};
use serde_json::Value;
use std::fs;
use std::io::Write as _;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{
    AddedToken, Encoding, ModelWrapper, PostProcessor as _, PostProcessorWrapper, Tokenizer as Inner,
};

/// Smallest vocabulary that can be trained: all bytes and the end of text.
pub const VOCABULARY_MINIMUM: usize = 257;

/// Largest vocabulary: the model takes ids as `i32`.
const VOCABULARY_MAXIMUM: usize = i32::MAX as usize;
/// Minimum frequency of a merge: a merge that occurs only once saves nothing.
const MERGE_FREQUENCY: u64 = 2;
/// Usual spellings of the end-of-text token. Tokenizers trained by Kiln use the first.
const END_OF_TEXT: [&str; 5] =
    ["<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<\u{FF5C}end\u{2581}of\u{2581}sentence\u{FF5C}>"];
const START_OF_TEXT: [&str; 4] =
    ["<s>", "<|begin_of_text|>", "<bos>", "<\u{FF5C}begin\u{2581}of\u{2581}sentence\u{FF5C}>"];

/// A tokenizer, trained by Kiln or loaded from a `tokenizer.json`.
///
/// By default, special tokens that are spelled out in a text are encoded as ordinary text;
/// [`Tokenizer::reading_special_tokens`] changes that. Encoding is deterministic: BPE `dropout` is off.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    inner: Inner,
    vocab_size: usize,
    /// Dropout set in the tokenizer's file; only [`Self::save`] uses it.
    dropout: Option<f32>,
    end_of_text: Option<u32>,
    start_of_text: Vec<u32>,
}

impl Tokenizer {
    /// Trains a byte-level BPE with the word boundaries of GPT-2. It can encode any text, and `<|endoftext|>` has id 0.
    /// Keep each text short: the trainer holds several copies of it in memory.
    ///
    /// # Errors
    ///
    /// The first error of `texts`, a vocabulary below [`VOCABULARY_MINIMUM`], or a failure of the training.
    pub fn train<I>(texts: I, vocab_size: usize) -> Result<Self>
    where
        I: Iterator<Item = Result<String>> + Send,
    {
        Self::train_ending_with(texts, vocab_size, END_OF_TEXT[0])
    }

    pub(super) fn train_ending_with<I>(texts: I, vocab_size: usize, end_of_text: &str) -> Result<Self>
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
            .special_tokens(vec![AddedToken::from(end_of_text, true)])
            .build();

        // The trainer takes plain texts, so the stream ends at an error.
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

    /// Reads a `tokenizer.json`. Ignores its truncation and padding.
    ///
    /// # Errors
    ///
    /// If the file is missing, cannot be read or is not a tokenizer.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        Self::from_file(read_file(path)?, path)
    }

    /// Parses the content of the tokenizer file `path`.
    pub fn from_file(content: Vec<u8>, path: &Path) -> Result<Self> {
        let unusable = |problem| DataError::TokenizerFile { path: path.to_path_buf(), problem };
        let mut inner = Inner::from_bytes(content).map_err(|error| unusable(error.to_string()))?;
        inner.with_truncation(None).map_err(|error| unusable(error.to_string()))?;
        inner.with_padding(None);
        Self::new(inner).map_err(unusable)
    }

    fn content(&self) -> Option<serde_json::Value> {
        serde_json::from_str(&self.inner.to_string(false).ok()?).ok()
    }

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
        let dropout = match inner.get_model() {
            ModelWrapper::BPE(model) => model.dropout,
            _ => None,
        };
        set_dropout(&mut inner, None);
        // Ids may have gaps, so the largest id determines the size.
        let largest = inner.get_vocab(true).into_values().max();
        let vocab_size = largest.ok_or("its vocabulary is empty")? as usize + 1;
        if vocab_size > VOCABULARY_MAXIMUM {
            return Err(format!("token id {} is larger than the maximum", vocab_size - 1));
        }
        let start_of_text = tokens_in_front(&inner);
        Ok(Self { inner, vocab_size, dropout, end_of_text: None, start_of_text })
    }

    /// Sets whether special tokens that are spelled out in a text are encoded as special tokens, as in prompts.
    pub fn reading_special_tokens(mut self, read: bool) -> Self {
        self.inner.set_encode_special_tokens(!read);
        self
    }
    /// Sets `id` as the end-of-text token; `None` keeps the current one.
    pub fn ending_with(mut self, id: Option<u32>) -> Self {
        self.end_of_text = id.or(self.end_of_text);
        self
    }

    /// Sets the end-of-text token: `spelling`, named by the user, or else the token in `names`. Fails if the vocabulary
    /// does not contain `spelling`.
    pub(super) fn ending_as_named(self, spelling: Option<&str>, names: &TokenNames) -> Result<Self> {
        if let Some(spelling) = spelling {
            let id = self.inner.token_to_id(spelling);
            let id = id.ok_or_else(|| DataError::UnknownToken {
                spelling: spelling.to_owned(),
                special: self.special_tokens().join(", "),
            })?;
            return Ok(self.ending_with(Some(id)));
        }
        let id = names.end.iter().find_map(|named| self.id_of(named));
        Ok(self.ending_with(id))
    }

    /// Returns the tokens in front of every document. `bos`: `None` uses the post-processor's tokens; `false` means no
    /// tokens; `true` fails without a start-of-text token.
    pub(super) fn start_of_document(&self, bos: Option<bool>, names: &TokenNames) -> Result<Vec<u32>> {
        let own = &self.start_of_text;
        match bos {
            Some(false) => Ok(Vec::new()),
            Some(true) if own.is_empty() => {
                let named = names.start.iter().find_map(|named| self.id_of(named));
                let id = named.or_else(|| self.special_token(&START_OF_TEXT));
                id.map(|id| vec![id]).ok_or(DataError::NoStartOfText)
            }
            _ => Ok(own.clone()),
        }
    }

    fn id_of(&self, named: &Named) -> Option<u32> {
        match named {
            Named::Id(id) => self.inner.id_to_token(*id).map(|_| *id),
            Named::Spelling(spelling) => self.inner.token_to_id(spelling),
        }
    }

    fn special_token(&self, spellings: &[&str]) -> Option<u32> {
        let is_special = |spelling: &&&str| self.inner.get_added_vocabulary().is_special_token(spelling);
        self.inner.token_to_id(spellings.iter().find(is_special)?)
    }

    pub(super) fn special_tokens(&self) -> Vec<String> {
        let mut tokens: Vec<_> = self.inner.get_added_tokens_decoder().into_iter().collect();
        tokens.retain(|(_, token)| token.special);
        tokens.sort_by_key(|(id, _)| *id);
        tokens.into_iter().map(|(_, token)| token.content).collect()
    }

    pub(super) fn cuts(&self) -> Cuts {
        Cuts::of(&self.inner)
    }

    pub(super) fn inner(&self) -> &Inner {
        &self.inner
    }

    /// Writes a `tokenizer.json` and waits until it is on disk.
    ///
    /// # Errors
    ///
    /// If the file cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let mut stored = self.inner.clone();
        set_dropout(&mut stored, self.dropout);
        let content = stored.to_string(true).map_err(|error| DataError::TokenizerFile {
            path: path.to_path_buf(),
            problem: error.to_string(),
        })?;
        let mut file = fs::File::create(path).map_err(DataError::io("create", path))?;
        file.write_all(content.as_bytes())
            .and_then(|()| file.sync_all())
            .map_err(DataError::io("write", path))
    }

    /// Returns the token ids of a text, without added tokens.
    ///
    /// # Errors
    ///
    /// If the tokenizer cannot express the text, which cannot happen for tokenizers trained by Kiln.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.inner.encode_fast(text, false).map_err(encode_failed)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Returns the token ids of each text, computed on all cores.
    ///
    /// # Errors
    ///
    /// Those of [`Self::encode`].
    pub fn encode_batch(&self, texts: Vec<&str>) -> Result<Vec<Vec<u32>>> {
        let encodings = self.inner.encode_batch_fast(texts, false).map_err(encode_failed)?;
        Ok(encodings.iter().map(|encoding| encoding.get_ids().to_vec()).collect())
    }

    /// Returns the number of tokens in front of a prompt, and all token ids including the prompt's. The
    /// post-processor's start tokens come first, unless the prompt starts with them, as in transformers.
    ///
    /// # Errors
    ///
    /// Those of [`Self::encode`].
    pub fn encode_prompt(&self, prompt: &str) -> Result<(usize, Vec<u32>)> {
        let ids = self.encode(prompt)?;
        let front = self.in_front_of(&ids);
        Ok((front.len(), [front, &ids].concat()))
    }

    /// Returns the token ids of a prompt and of its answer, which are encoded as one text. A token that spans the
    /// border belongs to the answer, as does white space at the end of the prompt (as in lm-evaluation-harness).
    ///
    /// # Errors
    ///
    /// Those of [`Self::encode`].
    pub fn encode_pair(&self, prompt: &str, answer: &str) -> Result<(Vec<u32>, Vec<u32>)> {
        if answer.is_empty() {
            return Ok((self.encode_prompt(prompt)?.1, Vec::new()));
        }
        let border = prompt.trim_end().len();
        let encoding = self.inner.encode(format!("{prompt}{answer}"), false).map_err(encode_failed)?;
        let ids = encoding.get_ids();
        let begins = encoding.get_offsets().iter().position(|(_, end)| *end > border);
        let (prompt, answer) = ids.split_at(begins.unwrap_or(ids.len()));
        Ok(([self.in_front_of(ids), prompt].concat(), answer.to_vec()))
    }
    fn in_front_of(&self, ids: &[u32]) -> &[u32] {
        if ids.starts_with(&self.start_of_text) { &[] } else { &self.start_of_text }
    }

    /// Returns a tokenizer for text that a chat template wrote: special tokens are read as tokens, and every byte
    /// belongs to a token.
    pub(super) fn for_rendered_text(self) -> Self {
        let mut rendered = self.reading_special_tokens(true);
        // It adds no tokens here, but may exclude white space from the ranges of tokens.
        rendered.inner.with_post_processor(None::<PostProcessorWrapper>);
        rendered
    }

    /// Returns the token ids of a text, and the ranges of tokens that overlap the byte ranges `ranges`. A range ends
    /// with its last special token, if only white space follows. Empty ranges are omitted.
    pub(super) fn encode_ranges(
        &self,
        text: &str,
        ranges: &[Range<usize>],
    ) -> Result<(Vec<u32>, Vec<Range<usize>>)> {
        let encoding = self.inner.encode(text, false).map_err(encode_failed)?;
        let (ids, offsets) = (encoding.get_ids(), encoding.get_offsets());
        let is_special = |id: u32| {
            let token = self.inner.id_to_token(id);
            token.is_some_and(|token| self.inner.get_added_vocabulary().is_special_token(&token))
        };
        let tokens = ranges.iter().map(|bytes| {
            let start = offsets.partition_point(|(_, end)| *end <= bytes.start);
            let mut end = offsets.partition_point(|(start, _)| *start < bytes.end).max(start);
            let space =
                |at: usize| text.get(offsets[at].1..bytes.end).is_none_or(|rest| rest.trim().is_empty());
            if let Some(last) = (start..end).rev().take_while(|at| space(*at)).find(|at| is_special(ids[*at]))
            {
                end = last + 1;
            }
            start..end
        });
        let tokens = tokens.filter(|range| !range.is_empty()).collect();
        Ok((ids.to_vec(), tokens))
    }

    /// Returns the text of token ids, including special tokens. Bytes that do not form a character become U+FFFD. Ids
    /// without a token are omitted.
    ///
    /// # Errors
    ///
    /// If the decoder of a loaded tokenizer fails.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.inner.decode(ids, false).map_err(|error| DataError::Decode { problem: error.to_string() })
    }

    /// Returns the spelling of token `id` in the vocabulary; `None` for an id without a token.
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// Returns the size of the vocabulary: one more than the largest id.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Returns the id of the end-of-text token: from [`Self::ending_with`], or a special token with a usual name.
    ///
    /// # Errors
    ///
    /// If there is no such token.
    pub fn end_of_text(&self) -> Result<u32> {
        let id = self.end_of_text.or_else(|| self.special_token(&END_OF_TEXT));
        id.ok_or_else(|| DataError::NoEndOfText {
            known: END_OF_TEXT.join(", "),
            special: self.special_tokens().join(", "),
        })
    }

    /// Returns the id of the start-of-text token: the post-processor's first, or a special token with a usual name.
    pub fn start_of_text(&self) -> Option<u32> {
        self.start_of_text.first().copied().or_else(|| self.special_token(&START_OF_TEXT))
    }
}

fn set_dropout(inner: &mut Inner, dropout: Option<f32>) {
    if let ModelWrapper::BPE(model) = inner.get_model()
        && model.dropout != dropout
    {
        let mut model = model.clone();
        model.dropout = dropout;
        inner.with_model(model);
    }
}

fn tokens_in_front(inner: &Inner) -> Vec<u32> {
    const TEXT: u32 = u32::MAX;
    let Some(processor) = inner.get_post_processor() else { return Vec::new() };
    let word = vec!["x".to_owned()];
    let text = Encoding::new(
        vec![TEXT],
        vec![0],
        word,
        vec![None],
        vec![(0, 1)],
        vec![0],
        vec![1],
        Vec::new(),
        Default::default(),
    );
    let Ok(processed) = processor.process(text, None, true) else { return Vec::new() };
    processed.get_ids().iter().copied().take_while(|id| *id != TEXT).collect()
}

fn read_file(path: &Path) -> Result<Vec<u8>> {
    if !path.try_exists().map_err(DataError::io("open", path))? {
        return Err(DataError::Missing { path: path.to_path_buf() });
    }
    files::read(path, MAX_WHOLE).map_err(DataError::io("read", path))
}

/// Reads a tokenizer file that the user named. A pipe is read until `stop` becomes true.
pub(super) fn read_named_tokenizer(path: &Path, stop: &AtomicBool) -> Result<Vec<u8>> {
    if Stream::from_path(path).is_none() {
        return read_file(path);
    }
    let mut content = Vec::new();
    stream::copy_to_end(path, &mut content, MAX_WHOLE, stop)?;
    Ok(content)
}

/// Reads the tokenizer of a folder of prepared data.
///
/// # Errors
///
/// If the tokenizer is missing, cannot be read, or has changed since the data was prepared.
pub fn read_tokenizer_of(folder: &Path) -> Result<Vec<u8>> {
    read_small_file(folder, TOKENIZER_FILE)
}

/// Reports whether two tokenizers differ, apart from formatting. Returns false if either file is not a tokenizer.
pub fn tokenizers_differ(a: &[u8], b: &[u8]) -> bool {
    if a == b {
        return false;
    }
    let content = |file: &[u8]| {
        let load = |file: Vec<u8>| Tokenizer::from_file(file, Path::new("")).ok()?.content();
        // Serialized twice, to normalize defaults that only files from other programs state.
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

#[derive(Clone, Debug, PartialEq, Eq)]
enum Named {
    Id(u32),
    Spelling(String),
}

/// Start-of-text and end-of-text tokens named by the files next to a tokenizer, in order of precedence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct TokenNames {
    start: Vec<Named>,
    end: Vec<Named>,
}

const FILES: [&str; 3] = ["config.json", "generation_config.json", "tokenizer_config.json"];

impl TokenNames {
    /// Reads the files in the folder of `tokenizer`. Fails if a file cannot be read or is not JSON.
    pub(super) fn next_to(tokenizer: &Path) -> Result<Self> {
        let folder = tokenizer.parent().unwrap_or(Path::new(""));
        let mut names = Self::default();
        for file in FILES {
            let path = folder.join(file);
            if !path.is_file() {
                continue;
            }
            let content = files::read(&path, MAX_WHOLE).map_err(DataError::io("read", &path))?;
            let content: Value = serde_json::from_slice(&content)
                .map_err(|error| DataError::Info { path, problem: error.to_string() })?;
            for (names, name) in [(&mut names.start, "bos_token"), (&mut names.end, "eos_token")] {
                names.extend(named(&content[format!("{name}_id")]));
                names.extend(named(&content[name]));
            }
        }
        Ok(names)
    }
}

/// Parses a token given as an id, a list of ids (the first counts), a spelling, or an object with a spelling.
fn named(value: &Value) -> Option<Named> {
    match value {
        Value::Number(id) => Some(Named::Id(u32::try_from(id.as_u64()?).ok()?)),
        Value::Array(ids) => named(ids.first()?),
        Value::String(spelling) => Some(Named::Spelling(spelling.clone())),
        Value::Object(token) => named(token.get("content")?),
        _ => None,
    }
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
    fn text_never_becomes_the_end_token() {
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
    fn tokenizers_are_compared_by_content() {
        let folder = tempfile::tempdir().unwrap();
        let file = |size: usize| {
            let path = folder.path().join("tokenizer.json");
            trained(size).save(&path).unwrap();
            fs::read(path).unwrap()
        };
        let (one, other) = (file(400), file(401));
        assert!(tokenizers_differ(&one, &other));
        assert!(!tokenizers_differ(&one, &one));
        let mut again: serde_json::Value = serde_json::from_slice(&one).unwrap();
        again["padding"] = serde_json::json!({
            "strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": null,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"
        });
        let merges = again["model"]["merges"].as_array_mut().unwrap();
        for merge in merges.iter_mut().filter(|merge| merge.is_array()) {
            *merge = format!("{} {}", merge[0].as_str().unwrap(), merge[1].as_str().unwrap()).into();
        }
        assert!(!tokenizers_differ(&one, again.to_string().as_bytes()));
        assert!(!tokenizers_differ(&one, b"{}"));
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

    #[test]
    fn token_names_follow_file_order() {
        let folder = tempfile::tempdir().unwrap();
        let write = |file: &str, content: &str| std::fs::write(folder.path().join(file), content).unwrap();
        let tokenizer = folder.path().join("tokenizer.json");
        assert_eq!(TokenNames::next_to(&tokenizer).unwrap(), TokenNames::default());
        write("tokenizer_config.json", r#"{"eos_token": {"content": "<a>"}, "bos_token": "<b>"}"#);
        write("generation_config.json", r#"{"eos_token_id": [7, 8], "pad_token_id": -1}"#);
        write("config.json", r#"{"eos_token_id": 3, "bos_token_id": null}"#);
        let names = TokenNames::next_to(&tokenizer).unwrap();
        let spelling = |text: &str| Named::Spelling(text.to_owned());
        assert_eq!(names.end, [Named::Id(3), Named::Id(7), spelling("<a>")]);
        assert_eq!(names.start, [spelling("<b>")]);
        write("config.json", "{");
        assert!(TokenNames::next_to(&tokenizer).unwrap_err().to_string().contains("config.json"));
    }
}
