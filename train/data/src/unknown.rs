//! Text that a tokenizer cannot express.

use serde_json::json;
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{Model as _, ModelWrapper, Tokenizer as Inner};

use super::{DataError, Result, Tokenizer};

/// Counts text that a tokenizer cannot express.
pub(super) struct Unknown {
    /// The token that stands for unknown text.
    id: Option<u32>,
    /// For a BPE without such a token, which omits characters instead: the same BPE with a token for them,
    /// and its id.
    dropped: Option<(Box<Inner>, u32)>,
}

impl Unknown {
    pub(super) fn of(tokenizer: &Tokenizer) -> Self {
        let inner = tokenizer.inner();
        let id = match inner.get_model() {
            ModelWrapper::BPE(model) => model.unk_token.as_ref().and_then(|token| model.token_to_id(token)),
            ModelWrapper::WordPiece(model) => model.token_to_id(&model.unk_token),
            ModelWrapper::WordLevel(model) => model.token_to_id(&model.unk_token),
            // The library does not expose it otherwise.
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

/// Reports whether a BPE without an unknown token lacks tokens for some characters.
fn leaves_characters_out(model: &BPE) -> bool {
    let vocabulary = model.get_vocab();
    let has_bytes =
        model.byte_fallback && (0..=u8::MAX).all(|byte| vocabulary.contains_key(&format!("<0x{byte:02X}>")));
    let has_alphabet = ByteLevel::alphabet()
        .iter()
        .all(|letter| vocabulary.contains_key(letter.encode_utf8(&mut [0; 4]) as &str));
    !has_bytes && !has_alphabet
}

/// Returns a BPE with an unknown token, which has the id `id`.
fn with_unknown(model: &BPE, id: usize) -> Option<(ModelWrapper, u32)> {
    /// A spelling that no vocabulary contains.
    const SPELLING: &str = "\u{0}unknown\u{0}";
    let mut model = serde_json::to_value(model).ok()?;
    model["vocab"][SPELLING] = json!(id);
    model["unk_token"] = json!(SPELLING);
    model["fuse_unk"] = json!(false);
    Some((serde_json::from_value(model).ok()?, u32::try_from(id).ok()?))
}
