//! Ids that start and end a text.

use std::path::Path;

use serde_json::{Value, json};

use super::keys::Keys;
use super::{CONFIG_FILE, GENERATION_FILE, HuggingFaceError};

/// Ids that start and end a text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenIds {
    /// Starts a text.
    pub start: Option<u32>,
    /// Each ends a text.
    pub end: Vec<u32>,
}

/// Ids that end a text, from `generation_config.json` or else `config.json` of `folder`; perhaps none.
pub fn end_ids(folder: &Path) -> Result<Vec<u32>, HuggingFaceError> {
    Ok(token_ids(folder)?.end)
}

/// Ids that start and end a text, as [`end_ids`].
pub(super) fn token_ids(folder: &Path) -> Result<TokenIds, HuggingFaceError> {
    let mut ids = TokenIds::default();
    for name in [GENERATION_FILE, CONFIG_FILE] {
        let path = folder.join(name);
        if path.is_file() {
            let keys = Keys::read(&path)?;
            if ids.start.is_none() {
                ids.start = keys.ids("bos_token_id")?.first().copied();
            }
            if ids.end.is_empty() {
                ids.end = keys.ids("eos_token_id")?;
            }
        }
    }
    Ok(ids)
}

/// The ids that end a text, as they stand in `config.json`: null, one, or a list.
pub(super) fn end_value(tokens: &TokenIds) -> Value {
    match tokens.end.as_slice() {
        [] => Value::Null,
        [id] => json!(id),
        ids => json!(ids),
    }
}

/// A `generation_config.json` with nothing but the ids.
pub(super) fn generation_config(tokens: &TokenIds) -> Value {
    json!({"bos_token_id": tokens.start, "eos_token_id": end_value(tokens)})
}
