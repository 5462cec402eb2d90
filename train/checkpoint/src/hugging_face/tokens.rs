//! Token ids that start and end a text, and the small files of a model that Kiln copies into checkpoints and exports.

use std::path::Path;
use std::sync::Arc;

use kiln_sys::files::{self, MAX_WHOLE};
use serde_json::{Value, json};

use super::keys::Keys;
use super::{CARRIED, CONFIG_FILE, GENERATION_FILE, check_inside};
use crate::CheckpointError;
use crate::error::Result;

/// Token ids that start, end and pad a text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenIds {
    /// Id that starts a text.
    pub start: Option<u32>,
    /// Ids that end a text.
    pub end: Vec<u32>,
    /// Id that pads the shorter texts of a batch.
    pub pad: Option<u32>,
}

impl TokenIds {
    fn add(&mut self, keys: &Keys) -> Result<()> {
        if self.start.is_none() {
            self.start = keys.ids("bos_token_id")?.first().copied();
        }
        if self.end.is_empty() {
            self.end = keys.ids("eos_token_id")?;
        }
        if self.pad.is_none() {
            // Some models use -1 for "no padding".
            let pad = keys.get("pad_token_id").and_then(Value::as_u64);
            self.pad = pad.and_then(|id| u32::try_from(id).ok());
        }
        Ok(())
    }

    pub(super) fn set_keys(&self, config: &mut Value) {
        let end = match self.end.as_slice() {
            [] => Value::Null,
            [id] => json!(id),
            ids => json!(ids),
        };
        for (key, ids) in
            [("bos_token_id", json!(self.start)), ("eos_token_id", end), ("pad_token_id", json!(self.pad))]
        {
            config[key] = ids;
        }
    }
}

/// Returns the ids in `generation_config.json` of `folder`, or else in `config.json`.
pub fn token_ids(folder: &Path) -> Result<TokenIds> {
    let mut ids = TokenIds::default();
    for name in [GENERATION_FILE, CONFIG_FILE] {
        let path = folder.join(name);
        if path.is_file() {
            ids.add(&Keys::read(&path)?)?;
        }
    }
    Ok(ids)
}

/// Settings for generating text that a model's authors recommend, in `generation_config.json`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[allow(missing_docs, reason = "as in `kiln_model::Sampling`")]
pub struct SamplingDefaults {
    pub temperature: Option<f64>,
    pub top_k: Option<usize>,
    pub top_p: Option<f64>,
    pub min_p: Option<f64>,
    pub repetition_penalty: Option<f64>,
}

/// Returns the settings in `generation_config.json` of `folder`. Fails if a setting has another type.
pub fn sampling_defaults(folder: &Path) -> Result<SamplingDefaults> {
    let path = folder.join(GENERATION_FILE);
    if !path.is_file() {
        return Ok(SamplingDefaults::default());
    }
    let keys = Keys::read(&path)?;
    Ok(SamplingDefaults {
        temperature: match keys.get("do_sample") {
            Some(Value::Bool(false)) => Some(0.0),
            _ => keys.number("temperature")?,
        },
        top_k: keys.size("top_k")?,
        top_p: keys.number("top_p")?,
        min_p: keys.number("min_p")?,
        repetition_penalty: keys.number("repetition_penalty")?,
    })
}

/// Name and content of a copied file.
pub type CarriedFile = (String, Arc<[u8]>);

/// Returns the small files of a model in `folder` to copy, with `tokens` in `generation_config.json`. Fails if a file
/// cannot be read, leads out of the folder, or is an invalid `generation_config.json`.
pub fn carried_files(folder: &Path, tokens: &TokenIds) -> Result<Vec<CarriedFile>> {
    let mut carried = Vec::new();
    for name in CARRIED {
        check_inside(folder, name)?;
        let path = folder.join(name);
        let is_there = path.is_file();
        if name == GENERATION_FILE {
            let (mut ids, mut config) = (TokenIds::default(), json!({}));
            if is_there {
                let keys = Keys::read(&path)?;
                ids.add(&keys)?;
                config = Value::Object(keys.map);
            }
            if ids != *tokens {
                carried.push(generation_file_with(config, tokens));
                continue;
            }
        }
        if is_there {
            let content = files::read(&path, MAX_WHOLE).map_err(CheckpointError::io("read", &path))?;
            carried.push((name.to_owned(), content.into()));
        }
    }
    Ok(carried)
}

/// Returns a `generation_config.json` that contains only `tokens`.
pub fn generation_file(tokens: &TokenIds) -> CarriedFile {
    generation_file_with(json!({}), tokens)
}

fn generation_file_with(mut config: Value, tokens: &TokenIds) -> CarriedFile {
    tokens.set_keys(&mut config);
    (GENERATION_FILE.to_owned(), format!("{config:#}\n").into_bytes().into())
}
