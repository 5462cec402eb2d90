//! Counts unknown text and spellings of special tokens, and computes the unigram loss.

use aho_corasick::{AhoCorasick, MatchKind};
use serde_json::json;
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{Model as _, ModelWrapper, Tokenizer as Inner};

use super::{DataError, Result, Tokenizer, UnigramEntropy};

pub(super) struct Unknown {
    id: Option<u32>,
    /// For a BPE that omits unknown characters: the same BPE with an unknown token, and the id of that token.
    dropped: Option<(Box<Inner>, u32)>,
}

impl Unknown {
    pub(super) fn new(tokenizer: &Tokenizer) -> Self {
        let inner = tokenizer.inner();
        let id = match inner.get_model() {
            ModelWrapper::BPE(model) => model.unk_token.as_ref().and_then(|token| model.token_to_id(token)),
            ModelWrapper::WordPiece(model) => model.token_to_id(&model.unk_token),
            ModelWrapper::WordLevel(model) => model.token_to_id(&model.unk_token),
            // The library has no accessor for `unk_id`.
            ModelWrapper::Unigram(model) => {
                let id = serde_json::to_value(model).ok().and_then(|model| model["unk_id"].as_u64());
                id.and_then(|id| u32::try_from(id).ok())
            }
        };
        let dropped = match inner.get_model() {
            ModelWrapper::BPE(model) if model.unk_token.is_none() && leaves_characters_out(model) => {
                with_unknown(model, tokenizer.vocab_size()).map(|(model, id)| {
                    let mut inner = inner.clone();
                    inner.with_model(model);
                    (Box::new(inner), id)
                })
            }
            _ => None,
        };
        Self { id, dropped }
    }

    /// Counts the unknown tokens among `ids`, or the characters of `text` that were omitted from them.
    pub(super) fn count(&self, text: &str, ids: &[u32]) -> Result<u64> {
        let count = |ids: &[u32], id: u32| ids.iter().filter(|other| **other == id).count() as u64;
        let unknown = self.id.map_or(0, |id| count(ids, id));
        let Some((inner, id)) = &self.dropped else { return Ok(unknown) };
        let failed = |error: tokenizers::Error| DataError::Encode { problem: error.to_string() };
        Ok(unknown + count(inner.encode_fast(text, false).map_err(failed)?.get_ids(), *id))
    }
}

fn leaves_characters_out(model: &BPE) -> bool {
    let vocabulary = model.get_vocab();
    let has_bytes =
        model.byte_fallback && (0..=u8::MAX).all(|byte| vocabulary.contains_key(&format!("<0x{byte:02X}>")));
    let has_alphabet = ByteLevel::alphabet()
        .iter()
        .all(|letter| vocabulary.contains_key(letter.encode_utf8(&mut [0; 4]) as &str));
    !has_bytes && !has_alphabet
}

fn with_unknown(model: &BPE, id: usize) -> Option<(ModelWrapper, u32)> {
    const SPELLING: &str = "\u{0}unknown\u{0}";
    let mut model = serde_json::to_value(model).ok()?;
    model["vocab"][SPELLING] = json!(id);
    model["unk_token"] = json!(SPELLING);
    model["fuse_unk"] = json!(false);
    Some((serde_json::from_value(model).ok()?, u32::try_from(id).ok()?))
}

pub(super) struct Spellings {
    tokens: Vec<String>,
    counts: Vec<u64>,
    automaton: Option<AhoCorasick>,
}

impl Spellings {
    pub(super) fn new(tokens: Vec<String>) -> Self {
        let tokens: Vec<_> = tokens.into_iter().filter(|token| !token.is_empty()).collect();
        let mut builder = AhoCorasick::builder();
        let automaton = builder.match_kind(MatchKind::LeftmostLongest).build(&tokens).ok();
        Self { counts: vec![0; tokens.len()], automaton: automaton.filter(|_| !tokens.is_empty()), tokens }
    }

    pub(super) fn count(&mut self, text: &str) {
        let Some(automaton) = &self.automaton else { return };
        for found in automaton.find_iter(text) {
            self.counts[found.pattern().as_usize()] += 1;
        }
    }

    pub(super) fn total(&self) -> u64 {
        self.counts.iter().sum()
    }

    pub(super) fn seen(&self) -> Vec<String> {
        let mut seen: Vec<_> =
            self.tokens.iter().zip(&self.counts).filter(|(_, count)| **count > 0).collect();
        seen.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
        seen.into_iter().map(|(token, _)| token.clone()).collect()
    }
}

/// Computes the loss of predicting the validation tokens from token counts, given one count per token of the
/// vocabulary.
pub(super) fn unigram_entropy(train: &[u64], validation: &[u64]) -> UnigramEntropy {
    // Adding one to every count gives tokens absent from the training split a probability above 0.
    let train_total = train.iter().sum::<u64>() as f64 + train.len() as f64;
    let total = validation.iter().sum::<u64>() as f64;
    let (mut entropy, mut cross_entropy) = (0.0, 0.0);
    for (&in_train, &count) in train.iter().zip(validation) {
        if count > 0 {
            let share = count as f64 / total;
            entropy -= share * share.ln();
            cross_entropy -= share * ((in_train + 1) as f64 / train_total).ln();
        }
    }
    UnigramEntropy { validation_under_train: cross_entropy, validation: entropy }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_spelling_counts() {
        let mut spellings = Spellings::new(["<a>", "<a>b", "<c>"].map(str::to_owned).to_vec());
        spellings.count("<a><a>b <A> <c <a>");
        spellings.count("<a>");
        assert_eq!((spellings.total(), spellings.seen()), (4, vec!["<a>".to_owned(), "<a>b".to_owned()]));
        let mut none = Spellings::new(Vec::new());
        none.count("<a>");
        assert_eq!(none.total(), 0);
    }

    #[test]
    fn matches_the_formulas() {
        let figures = unigram_entropy(&[2, 0, 0], &[1, 1, 0]);
        assert!((figures.validation - 2.0_f64.ln()).abs() < 1e-12);
        let expected = -0.5 * (0.6_f64.ln() + 0.2_f64.ln());
        assert!((figures.validation_under_train - expected).abs() < 1e-12);
    }

    #[test]
    fn cross_entropy_is_never_below_entropy() {
        let figures = unigram_entropy(&[100, 10, 1, 7], &[3, 3, 3, 1]);
        assert!(figures.validation_under_train > figures.validation);
    }
}
