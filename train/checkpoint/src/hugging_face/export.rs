//! Export of any readable model to the layout of Hugging Face: the implementation of `kiln export`.

use std::path::Path;

use kiln_data::Tokenizer;
use kiln_sys::Meter;
use serde_json::{Value, json};

use super::describe::to_json;
use super::folder::part_shape;
use super::names::hugging_face_names;
use super::output::NewFolder;
use super::tokens::{TokenIds, generation_config};
use super::writer::{Item, index, write_file};
use super::{
    CONFIG_FILE, GENERATION_FILE, HuggingFaceError, INDEX_FILE, MODEL_FILE, TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE, carried_files, token_ids,
};
use crate::CheckpointError;
use crate::sharded::{outline, parameter_shapes};
use crate::source::ModelSource;
use crate::weights::{Watched, Weights as _};

pub use super::writer::ExportDtype;

/// Writes a model in the layout of Hugging Face into the new folder `out`, in files of at most
/// `max_shard_bytes` unless a single weight is larger. Holds one weight in memory at a time. `meter` counts the
/// bytes of the weights, as f32.
///
/// # Errors
///
/// If the model cannot be read, if a weight is not finite, if no architecture there has all features of the
/// model, if `out` exists already, and if the disk fails.
pub fn export(
    source: &ModelSource,
    out: &Path,
    dtype: ExportDtype,
    max_shard_bytes: usize,
    meter: &Meter,
) -> Result<(), CheckpointError> {
    let folder = source.folder();
    let tokens = tokens_of(source)?;
    let config = to_json(source.model(), source.context_length(), &tokens, dtype.torch_name(), folder)?;
    let weights = source.weights();
    let weights = Watched::new(weights.as_ref(), meter);
    let items = items(source)?;
    let known: std::collections::BTreeSet<_> = items.iter().map(|item| item.name.as_str()).collect();
    if let Some(name) = weights.shapes().keys().find(|name| !known.contains(*name)) {
        let (path, name) = (folder.to_owned(), (*name).to_owned());
        return Err(HuggingFaceError::Unnamed { path, name }.into());
    }
    let out = NewFolder::create(out)?;
    let carried = carried_files(folder, &tokens)?;
    for (name, content) in &carried {
        out.write(name, content)?;
    }
    let is_carried = |name: &str| carried.iter().any(|(carried, _)| carried == name);
    out.write_json(CONFIG_FILE, &config)?;
    if !is_carried(GENERATION_FILE) {
        out.write_json(GENERATION_FILE, &generation_config(&tokens))?;
    }
    if is_carried(TOKENIZER_FILE) && !is_carried(TOKENIZER_CONFIG_FILE) {
        out.write_json(TOKENIZER_CONFIG_FILE, &tokenizer_config(source, &tokens)?)?;
    }
    let files = split(items, dtype, max_shard_bytes);
    for (name, items) in &files {
        write_file(&out, name, &weights, items, dtype)?;
    }
    if files.len() > 1 {
        out.write_json(INDEX_FILE, &index(&files, dtype))?;
    }
    weights.check()?;
    Ok(out.commit()?)
}

/// Returns all weights of the decoder, in its order, with their names there.
fn items(source: &ModelSource) -> Result<Vec<Item>, HuggingFaceError> {
    let mut items = Vec::new();
    for (name, shape) in parameter_shapes(&outline(source.model())?) {
        let Some(parts) = hugging_face_names(&name, &shape) else {
            return Err(HuggingFaceError::Unnamed { path: source.folder().to_owned(), name });
        };
        let shape = part_shape(&shape, parts.len()).to_vec();
        let len: usize = shape.iter().product();
        let item =
            |(index, there)| Item { name: name.clone(), first: index * len, shape: shape.clone(), there };
        items.extend(parts.into_iter().enumerate().map(item));
    }
    Ok(items)
}

/// Divides items into files, each as large as `most` bytes allow, with at least one weight.
fn split(items: Vec<Item>, dtype: ExportDtype, most: usize) -> Vec<(String, Vec<Item>)> {
    let mut groups: Vec<Vec<Item>> = Vec::new();
    let mut used = 0;
    for item in items {
        let bytes = item.bytes(dtype);
        match groups.last_mut() {
            Some(group) if used + bytes <= most => {
                used += bytes;
                group.push(item);
            }
            _ => {
                used = bytes;
                groups.push(vec![item]);
            }
        }
    }
    let count = groups.len();
    let name = |index: usize| match count {
        1 => MODEL_FILE.to_owned(),
        _ => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
    };
    groups.into_iter().enumerate().map(|(index, group)| (name(index), group)).collect()
}

/// Returns ids that start and end a text: from the folder, or else from the tokenizer.
fn tokens_of(source: &ModelSource) -> Result<TokenIds, CheckpointError> {
    let mut tokens = token_ids(source.folder())?;
    let path = source.tokenizer();
    if !path.is_file() {
        return Ok(tokens);
    }
    let tokenizer = Tokenizer::load(&path)?;
    if tokens.end.is_empty() {
        // A tokenizer may have no such token.
        tokens.end = tokenizer.end_of_text().into_iter().collect();
    }
    tokens.start = tokens.start.or_else(|| tokenizer.start_of_text());
    Ok(tokens)
}

/// As much as transformers needs to load `tokenizer.json` by itself.
fn tokenizer_config(source: &ModelSource, tokens: &TokenIds) -> Result<Value, CheckpointError> {
    let tokenizer = Tokenizer::load(source.tokenizer())?;
    let mut config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": source.context_length(),
        "clean_up_tokenization_spaces": false,
    });
    for (key, id) in [("bos_token", tokens.start), ("eos_token", tokens.end.first().copied())] {
        if let Some(id) = id {
            config[key] = json!(tokenizer.decode(&[id])?);
        }
    }
    Ok(config)
}
