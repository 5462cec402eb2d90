//! Finds places where a document can be cut such that encoding the pieces gives the same tokens as encoding the whole.
//!
//! Encoding takes about 150 bytes of memory for each byte of text, so a large file must be encoded in pieces.
//! Tokenizers unknown to [`Cuts::of`] encode documents whole.
//!
//! Candidate places are: after a single newline between a character that is not white space and a letter or digit; and
//! at a single space between two ASCII letters or digits. A candidate is safe under three conditions:
//!
//! - No added token, and no match of a normalizer or pre-tokenizer, spans it.
//! - The tokenizer does not take the start of the second piece for the start of a text, and puts no extra space there.
//! - The pre-tokenizer always splits there, or no merge spans the place. The latter holds for a BPE without a token that
//!   contains the two characters next to each other.

use std::borrow::Cow;

use tokenizers::models::bpe::BPE;
use tokenizers::normalizers::replace::ReplacePattern;
use tokenizers::pre_tokenizers::metaspace::PrependScheme;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{
    AddedToken, ModelWrapper, NormalizedString, Normalizer as _, NormalizerWrapper, PreTokenizerWrapper,
    SplitDelimiterBehavior, Tokenizer as Inner,
};

const SENTENCEPIECE_SPACE: char = '\u{2581}';

const BYTE_LEVEL_SPACE: char = '\u{120}';

/// Patterns that match all white space, with no space after a letter or digit, and no letter or digit after a newline.
/// They look ahead only after repeated white space. A match therefore starts or ends at both kinds of candidate places.
const SPLITTING_PATTERNS: [&str; 7] = [
    // GPT-2.
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    // GPT-4, Llama 3.
    concat!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|",
        r"\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    // Qwen 2 and 3.
    concat!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|",
        r"\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    // Qwen 3.5.
    concat!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|",
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    // GPT-4o, gpt-oss, Llama 4.
    concat!(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    // Mistral's Tekken.
    concat!(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    // DeepSeek V3, after the patterns for its digits and ideographs.
    concat!(
        r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"##,
        r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
];

/// Patterns whose matches contain neither spaces nor newlines, and do not depend on the surrounding text.
const INNER_PATTERNS: [&str; 4] = [r"\p{N}", r"\p{N}{1,3}", "[0-9][0-9][0-9]", r"[一-龥぀-ゟ゠-ヿ]+"];

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Cuts {
    /// Between any two characters, for text that is not encoded.
    anywhere: bool,
    after_line: bool,
    at_space: bool,
    /// True if the tokenizer adds a space in front of a piece, whose own space must therefore be removed.
    restores_space: bool,
}

impl Cuts {
    pub(super) const ANYWHERE: Self =
        Self { anywhere: true, after_line: false, at_space: false, restores_space: false };

    /// Places for a tokenizer with the word boundaries of GPT-2.
    pub(super) const AT_WORDS: Self =
        Self { anywhere: false, after_line: true, at_space: true, restores_space: false };

    pub(super) fn of(tokenizer: &Inner) -> Self {
        let Some(normalized) = Normalized::by(tokenizer.get_normalizer()) else { return Self::default() };
        if !added_tokens_stay_apart(tokenizer, normalized) {
            return Self::default();
        }
        let borders = Borders::of(tokenizer.get_pre_tokenizer(), normalized);
        let at_space = borders.at_space || borders.unbroken && no_merge_spans(tokenizer, borders.space);
        Self {
            anywhere: false,
            after_line: borders.after_line && !borders.prefixes && !normalized.prepends,
            at_space,
            restores_space: at_space && normalized.prepends,
        }
    }

    /// Returns the last safe place in `text` up to byte `limit`, but not its start.
    pub(super) fn last_place(self, text: &str, limit: usize) -> Option<usize> {
        let limit = limit.min(text.len().saturating_sub(1));
        if self.anywhere {
            return Some(text.floor_char_boundary(limit)).filter(|at| *at > 0);
        }
        if !self.after_line && !self.at_space {
            return None;
        }
        (1..=limit).rev().find(|at| self.is_place(text, *at))
    }

    /// Reports whether `text` can be cut before byte `at`, which must be neither its start nor its end.
    fn is_place(self, text: &str, at: usize) -> bool {
        let bytes = text.as_bytes();
        let (before, here) = (bytes[at - 1], bytes[at]);
        if here == b' ' {
            let next = bytes.get(at + 1).is_some_and(u8::is_ascii_alphanumeric);
            return self.at_space && before.is_ascii_alphanumeric() && next;
        }
        if before != b'\n' || !self.after_line {
            return false;
        }
        let next = text[at..].chars().next();
        let previous = text[..at - 1].chars().next_back();
        next.is_some_and(char::is_alphanumeric) && previous.is_some_and(|letter| !letter.is_whitespace())
    }

    /// Returns the piece `text` in the form passed to the tokenizer. `starts`: it starts a document.
    pub(super) fn as_encoded(self, text: &str, starts: bool) -> &str {
        match self.restores_space && !starts {
            true => text.strip_prefix(' ').unwrap_or(text),
            false => text,
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Normalized {
    prepends: bool,
    replaces: bool,
}

impl Normalized {
    /// Returns the effects of `normalizer`; `None` if it may change more than single characters and accents.
    fn by(normalizer: Option<&NormalizerWrapper>) -> Option<Self> {
        let mut found = Self::default();
        if let Some(normalizer) = normalizer {
            found.add(normalizer)?;
        }
        // A prefix stands for a space only if it equals the replacement for spaces.
        (found.replaces || !found.prepends).then_some(found)
    }

    fn add(&mut self, normalizer: &NormalizerWrapper) -> Option<()> {
        match normalizer {
            NormalizerWrapper::Sequence(sequence) => {
                sequence.as_ref().iter().try_for_each(|normalizer| self.add(normalizer))?;
            }
            // These normalizers never change or compose spaces, newlines, ASCII letters and digits.
            NormalizerWrapper::NFC(_)
            | NormalizerWrapper::NFD(_)
            | NormalizerWrapper::NFKC(_)
            | NormalizerWrapper::NFKD(_)
            | NormalizerWrapper::Lowercase(_) => {}
            NormalizerWrapper::Prepend(prepend)
                if is_sentencepiece_space(&prepend.prepend) && !self.prepends =>
            {
                self.prepends = true;
            }
            NormalizerWrapper::Replace(replace) => {
                let pattern = serde_json::to_value(replace).ok()?.get("pattern").cloned()?;
                let pattern: ReplacePattern = serde_json::from_value(pattern).ok()?;
                if pattern != ReplacePattern::String(" ".to_owned())
                    || !is_sentencepiece_space(&replace.content)
                {
                    return None;
                }
                self.replaces = true;
            }
            _ => return None,
        }
        Some(())
    }
}

#[derive(Clone, Copy, Debug)]
struct Borders {
    after_line: bool,
    at_space: bool,
    /// True if no other match of the pre-tokenizer depends on text on both sides of a place.
    unbroken: bool,
    /// True if it may put a space in front of a piece that does not start with one.
    prefixes: bool,
    /// The character that the model sees instead of a space.
    space: char,
}

impl Borders {
    fn of(pre_tokenizer: Option<&PreTokenizerWrapper>, normalized: Normalized) -> Self {
        let space = if normalized.replaces { SENTENCEPIECE_SPACE } else { ' ' };
        let mut borders = Self { after_line: false, at_space: false, unbroken: true, prefixes: false, space };
        for (index, stage) in stages(pre_tokenizer).into_iter().enumerate() {
            borders.add(stage, index == 0);
        }
        borders
    }

    fn add(&mut self, stage: &PreTokenizerWrapper, is_first: bool) {
        // On rewritten text, only the existing borders are known to remain.
        let is_plain = self.space == ' ';
        match stage {
            PreTokenizerWrapper::ByteLevel(stage) => {
                if stage.use_regex && is_plain {
                    self.split_everywhere();
                } else if !is_plain {
                    self.unbroken = false;
                }
                self.prefixes |= stage.add_prefix_space;
                self.space = BYTE_LEVEL_SPACE;
            }
            PreTokenizerWrapper::Split(stage)
                if is_plain && keeps_all(stage) && is_in(&SPLITTING_PATTERNS, stage) =>
            {
                self.split_everywhere();
            }
            PreTokenizerWrapper::Split(stage)
                if is_in(&INNER_PATTERNS, stage) && self.space != BYTE_LEVEL_SPACE => {}
            // The stage leaves text without spaces unchanged.
            PreTokenizerWrapper::Split(stage)
                if !is_plain && stage.pattern == SplitPattern::String(" ".to_owned()) => {}
            PreTokenizerWrapper::Digits(_) | PreTokenizerWrapper::Punctuation(_)
                if self.space != BYTE_LEVEL_SPACE => {}
            PreTokenizerWrapper::Whitespace(_) | PreTokenizerWrapper::WhitespaceSplit(_) if is_plain => {
                self.split_everywhere();
            }
            PreTokenizerWrapper::Metaspace(stage)
                if self.space != BYTE_LEVEL_SPACE && stage.get_replacement() == SENTENCEPIECE_SPACE =>
            {
                let scheme = stage.get_prepend_scheme();
                // This stage depends on the start of the text, where an earlier stage may have removed a space.
                if scheme == PrependScheme::First && !is_first {
                    *self = Self { at_space: false, after_line: false, unbroken: false, ..*self };
                }
                self.at_space |= stage.get_split() && self.unbroken;
                self.prefixes |= scheme != PrependScheme::Never;
                self.space = SENTENCEPIECE_SPACE;
            }
            // Existing borders remain, since every stage sees the pieces one by one.
            _ => self.unbroken = false,
        }
    }

    fn split_everywhere(&mut self) {
        self.after_line |= self.unbroken;
        self.at_space |= self.unbroken;
    }
}

fn stages(pre_tokenizer: Option<&PreTokenizerWrapper>) -> Vec<&PreTokenizerWrapper> {
    match pre_tokenizer {
        None => Vec::new(),
        Some(PreTokenizerWrapper::Sequence(sequence)) => {
            sequence.as_ref().iter().flat_map(|stage| stages(Some(stage))).collect()
        }
        Some(stage) => vec![stage],
    }
}

/// Reports whether each match of `split` becomes one piece, and no matched text is removed.
fn keeps_all(split: &Split) -> bool {
    matches!(
        (split.behavior, split.invert),
        (SplitDelimiterBehavior::Isolated, false) | (SplitDelimiterBehavior::Removed, true)
    )
}

fn is_in(patterns: &[&str], split: &Split) -> bool {
    let SplitPattern::Regex(pattern) = &split.pattern else { return false };
    // Some files contain the characters instead of their escapes.
    let pattern = pattern.replace('\r', r"\r").replace('\n', r"\n");
    patterns.contains(&pattern.as_str())
}

fn is_sentencepiece_space(text: &str) -> bool {
    text.strip_prefix(SENTENCEPIECE_SPACE).is_some_and(str::is_empty)
}

/// Reports whether no added token can span a candidate place, strip white space across it, or depend on its other side.
fn added_tokens_stay_apart(tokenizer: &Inner, normalized: Normalized) -> bool {
    let skips_special = tokenizer.get_encode_special_tokens();
    let added = tokenizer.get_added_tokens_decoder();
    let looked_for = added.values().filter(|token| !(token.special && skips_special));
    looked_for.into_iter().all(|token| {
        let AddedToken { single_word, lstrip, rstrip, ref content, .. } = *token;
        let spellings = [Cow::Borrowed(content.as_str()), normalized_spelling(tokenizer, token)];
        // A piece passed without its space starts with a letter or digit.
        let starts_a_piece = normalized.prepends && content.starts_with(|c: char| c.is_ascii_alphanumeric());
        let spans = spellings.iter().any(|text| spans_place(text, &[' ', SENTENCEPIECE_SPACE]));
        !(single_word || lstrip || rstrip || starts_a_piece || spans)
    })
}

fn normalized_spelling<'a>(tokenizer: &Inner, token: &'a AddedToken) -> Cow<'a, str> {
    let normalizer = tokenizer.get_normalizer().filter(|_| token.normalized);
    let mut text = NormalizedString::from(token.content.as_str());
    match normalizer.map(|normalizer| normalizer.normalize(&mut text)) {
        Some(Ok(())) => Cow::Owned(text.get().to_owned()),
        _ => Cow::Borrowed(&token.content),
    }
}

/// Reports whether `text` contains a candidate place; any character of `spaces` counts as a space.
fn spans_place(text: &str, spaces: &[char]) -> bool {
    spans_space(text, spaces) || pairs(text).any(|(a, b)| a == '\n' && b.is_alphanumeric())
}

fn spans_space(text: &str, spaces: &[char]) -> bool {
    pairs(text).any(|(a, b)| a.is_ascii_alphanumeric() && spaces.contains(&b))
}

fn pairs(text: &str) -> impl Iterator<Item = (char, char)> {
    text.chars().zip(text.chars().skip(1))
}

/// Reports whether the model is a BPE that never merges `space`, its spelling of a space, with the preceding character.
fn no_merge_spans(tokenizer: &Inner, space: char) -> bool {
    let ModelWrapper::BPE(model) = tokenizer.get_model() else { return false };
    let BPE { continuing_subword_prefix, end_of_word_suffix, .. } = model;
    let has = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
    let vocabulary = model.get_vocab();
    // With `ignore_merges`, a piece in the vocabulary is one token, although merges give the uncut text other tokens.
    !model.ignore_merges
        && !has(continuing_subword_prefix)
        && !has(end_of_word_suffix)
        && vocabulary.contains_key(space.encode_utf8(&mut [0; 4]) as &str)
        && !vocabulary.keys().any(|token| spans_space(token, &[space]))
}

#[cfg(test)]
mod tests;
