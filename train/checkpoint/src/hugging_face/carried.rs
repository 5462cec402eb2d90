//! The small files of a model that Kiln passes on: tokenizer, chat template, generation settings.

use std::path::Path;
use std::sync::Arc;

use kiln_sys::files::{self, MAX_WHOLE};
use serde_json::{Value, json};

use super::keys::Keys;
use super::tokens::{TokenIds, end_value, generation_config, ids_of};
use super::{CARRIED, GENERATION_FILE, HuggingFaceError};

/// A file that Kiln passes on: its name and its contents.
pub type CarriedFile = (String, Arc<[u8]>);

/// Returns the files in `folder`, a Hugging Face folder or a checkpoint, that Kiln passes on. `tokens` are
/// added to `generation_config.json`: `config.json`, which may be their only source, is not passed on.
///
/// # Errors
///
/// If a file cannot be read or leads out of the folder, or if `generation_config.json` is invalid.
pub fn carried_files(folder: &Path, tokens: &TokenIds) -> Result<Vec<CarriedFile>, HuggingFaceError> {
    let mut carried = Vec::new();
    for name in CARRIED {
        let path = folder.join(name);
        HuggingFaceError::check_inside(folder, name)?;
        let content = match path.is_file() {
            true => Some(files::read(&path, MAX_WHOLE).map_err(HuggingFaceError::io("read", &path))?),
            false => None,
        };
        let content = match name {
            GENERATION_FILE => with_ids(&path, content, tokens)?,
            _ => content,
        };
        carried.extend(content.map(|content| (name.to_owned(), content.into())));
    }
    Ok(carried)
}

/// A `generation_config.json` that names `tokens` and nothing else.
pub fn generation_file(tokens: &TokenIds) -> CarriedFile {
    (GENERATION_FILE.to_owned(), format!("{:#}\n", generation_config(tokens)).into_bytes().into())
}

/// `content`, the generation settings at `path`, with `tokens` where it does not name them.
fn with_ids(
    path: &Path,
    content: Option<Vec<u8>>,
    tokens: &TokenIds,
) -> Result<Option<Vec<u8>>, HuggingFaceError> {
    let mut ids = TokenIds::default();
    if content.is_some() {
        ids_of(&Keys::read(path)?, &mut ids)?;
    }
    if ids == *tokens {
        return Ok(content);
    }
    let config = match content {
        None => generation_config(tokens),
        Some(content) => {
            let json = |error: serde_json::Error| HuggingFaceError::Json {
                path: path.to_owned(),
                problem: error.to_string(),
            };
            let mut config: Value = serde_json::from_slice(&content).map_err(json)?;
            config["bos_token_id"] = json!(tokens.start);
            config["eos_token_id"] = end_value(tokens);
            config["pad_token_id"] = json!(tokens.pad);
            config
        }
    };
    Ok(Some(format!("{config:#}\n").into_bytes()))
}
