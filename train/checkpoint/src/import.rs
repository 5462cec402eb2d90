//! Imports a model in the Hugging Face layout as a Kiln checkpoint of step 0, for `kiln import`.

use std::path::Path;

use kiln_sys::Meter;

use crate::error::Result;
use crate::hugging_face::{HuggingFaceFolder, carried_files, token_ids};
use crate::sharded::{layout_of, outline};
use crate::source::ModelSource;
use crate::write::{check_free, write_full};
use crate::{CheckpointState, SaveContext};

/// Writes a full checkpoint of a model, without optimizer state, to `out`. `config`: the configuration of a run that
/// could have trained the model. Holds one weight in memory at a time. `meter` counts the bytes of the weights. Fails
/// if the tokenizer is unusable or `out` exists.
pub fn import(folder: &HuggingFaceFolder, config: String, out: &Path, meter: &Meter) -> Result<()> {
    let source = ModelSource::HuggingFace(Box::new(folder.clone()));
    if source.tokenizer().exists() {
        // Fail before the long work if the tokenizer is unusable.
        let tokenizer = source.load_tokenizer()?;
        if folder.end_ids().is_empty() {
            tokenizer.end_of_text()?;
        }
    }
    check_free(out)?;
    let files = carried_files(source.folder(), &token_ids(source.folder())?)?;
    let layout = layout_of(&outline(folder.model())?, 1);
    let state = CheckpointState::new(folder.model().clone(), folder.context_length());
    let context = SaveContext { config: Some(config), files, ..SaveContext::new(state) };
    write_full(out, folder, &layout, &context, meter)
}
