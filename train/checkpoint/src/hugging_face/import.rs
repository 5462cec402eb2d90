//! A model in the layout of Hugging Face becomes a checkpoint of Kiln, of step 0 and without optimizer state: what
//! is behind `kiln import`.

use std::path::{Path, PathBuf};

use kiln_process::Meter;
use serde_json::json;

use super::output::NewFolder;
use super::tokens::{end_value, generation_config, token_ids};
use super::{CARRIED, GENERATION_FILE, HuggingFaceError, HuggingFaceFolder};
use crate::sharded::{layout_of, outline};
use crate::source::ModelSource;
use crate::{CheckpointError, CheckpointState, SaveContext, write_full};

/// Makes a full checkpoint at `out` of a model, with `config` as the configuration of a run that would have
/// trained it. Holds one weight in memory at a time. `meter` counts the bytes of the weights.
///
/// # Errors
///
/// When the tokenizer cannot be used, when there is something at `out` already, and when the disk fails.
pub fn import(
    model: &HuggingFaceFolder,
    config: String,
    out: &Path,
    meter: &Meter,
) -> Result<(), CheckpointError> {
    let source = ModelSource::HuggingFace(Box::new(model.clone()));
    if source.tokenizer().exists() {
        // What nothing could use afterwards is better refused now.
        let tokenizer = source.load_tokenizer()?;
        if model.end_ids().is_empty() {
            tokenizer.end_of_text()?;
        }
    }
    let folder = model.folder();
    // What is not weights is put together here and copied from here.
    let aside = NewFolder::create(out)?;
    let carried = aside.carry(folder, &CARRIED)?;
    keep_token_ids(folder, &aside, carried.contains(&GENERATION_FILE))?;
    write_checkpoint(model, config, aside.files()?, out, meter)
}

/// Ids that only `config.json` names, which is not carried along, go to `generation_config.json`.
fn keep_token_ids(
    folder: &Path,
    out: &NewFolder,
    has_generation_config: bool,
) -> Result<(), HuggingFaceError> {
    let tokens = token_ids(folder)?;
    if token_ids(out.path())? == tokens {
        return Ok(());
    }
    if !has_generation_config {
        return out.write_json(GENERATION_FILE, &generation_config(&tokens));
    }
    let path = out.path().join(GENERATION_FILE);
    let text = std::fs::read(&path).map_err(HuggingFaceError::io("read", &path))?;
    let mut config: serde_json::Value = serde_json::from_slice(&text)
        .map_err(|error| HuggingFaceError::Json { path, problem: error.to_string() })?;
    config["bos_token_id"] = json!(tokens.start);
    config["eos_token_id"] = end_value(&tokens);
    out.write_json(GENERATION_FILE, &config)
}

fn write_checkpoint(
    source: &HuggingFaceFolder,
    config: String,
    files: Vec<PathBuf>,
    out: &Path,
    meter: &Meter,
) -> Result<(), CheckpointError> {
    let model = source.model();
    let layout = layout_of(&outline(model)?, 1);
    let state = CheckpointState {
        step: 0,
        skipped: 0,
        loss_scale: None,
        next_sample: 0,
        tokens: 0,
        seed: 0,
        model: model.clone(),
        context_length: source.context_length(),
        data_sha256: None,
    };
    let context = SaveContext { config: Some(config), files, ..SaveContext::new(state) };
    write_full(out, source, &layout, &context, meter)
}
