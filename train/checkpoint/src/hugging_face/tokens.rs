//! Ids that start and end a text.

use std::path::Path;

use serde_json::{Value, json};

use super::keys::Keys;
use super::{CONFIG_FILE, GENERATION_FILE, HuggingFaceError};

/// Ids that start, end and pad a text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenIds {
    /// Id that starts a text.
    pub start: Option<u32>,
    /// Ids that end a text.
    pub end: Vec<u32>,
    /// Id that pads shorter texts of a batch.
    pub pad: Option<u32>,
}

/// Returns the ids that end a text, from `generation_config.json` or else `config.json` of `folder`; may be
/// empty.
pub fn end_ids(folder: &Path) -> Result<Vec<u32>, HuggingFaceError> {
    Ok(token_ids(folder)?.end)
}

/// Returns the ids that start, end and pad a text, like [`end_ids`].
pub fn token_ids(folder: &Path) -> Result<TokenIds, HuggingFaceError> {
    let mut ids = TokenIds::default();
    for name in [GENERATION_FILE, CONFIG_FILE] {
        let path = folder.join(name);
        if path.is_file() {
            ids_of(&Keys::read(&path)?, &mut ids)?;
        }
    }
    Ok(ids)
}

/// Adds the ids of a file to `ids`, where `ids` has none yet.
pub(super) fn ids_of(keys: &Keys, ids: &mut TokenIds) -> Result<(), HuggingFaceError> {
    if ids.start.is_none() {
        ids.start = keys.ids("bos_token_id")?.first().copied();
    }
    if ids.end.is_empty() {
        ids.end = keys.ids("eos_token_id")?;
    }
    if ids.pad.is_none() {
        // Some models use -1 for "no padding".
        let pad = keys.get("pad_token_id").and_then(Value::as_u64);
        ids.pad = pad.and_then(|id| u32::try_from(id).ok());
    }
    Ok(())
}

/// Returns the ids that end a text, in the form of `config.json`: null, a number, or an array.
pub(super) fn end_value(tokens: &TokenIds) -> Value {
    match tokens.end.as_slice() {
        [] => Value::Null,
        [id] => json!(id),
        ids => json!(ids),
    }
}

/// Returns a `generation_config.json` with only the ids.
pub(super) fn generation_config(tokens: &TokenIds) -> Value {
    json!({
        "bos_token_id": tokens.start,
        "eos_token_id": end_value(tokens),
        "pad_token_id": tokens.pad,
    })
}
