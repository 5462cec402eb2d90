//! Import of a model in the layout of Hugging Face as a checkpoint of Kiln, of step 0 and without optimizer
//! state: the implementation of `kiln import`.

use std::path::Path;
use std::sync::Arc;

use kiln_sys::Meter;

use super::{HuggingFaceFolder, carried_files, check_free, token_ids};
use crate::sharded::{layout_of, outline};
use crate::source::ModelSource;
use crate::{CheckpointError, CheckpointState, SaveContext, write_full};

/// Writes a full checkpoint of a model to `out`, with `config` as the configuration of a run that could have
/// trained it. Holds one weight in memory at a time. `meter` counts the bytes of the weights.
///
/// # Errors
///
/// If the tokenizer is unusable, if `out` exists already, and if the disk fails.
pub fn import(
    model: &HuggingFaceFolder,
    config: String,
    out: &Path,
    meter: &Meter,
) -> Result<(), CheckpointError> {
    let source = ModelSource::HuggingFace(Box::new(model.clone()));
    if source.tokenizer().exists() {
        // An unusable model is refused before the work starts.
        let tokenizer = source.load_tokenizer()?;
        if model.end_ids().is_empty() {
            tokenizer.end_of_text()?;
        }
    }
    check_free(out)?;
    let files = carried_files(model.folder(), &token_ids(model.folder())?)?;
    write_checkpoint(model, config, files, out, meter)
}

fn write_checkpoint(
    source: &HuggingFaceFolder,
    config: String,
    files: Vec<(String, Arc<[u8]>)>,
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
