//! A text that the model has generated, and the file of them.

use std::path::Path;

use kiln_observe::run::Sample;
use kiln_storage::Lines;

/// A text of the model.
#[derive(Clone, Debug)]
pub(super) struct Text {
    /// With its prompt.
    pub(super) whole: String,
    pub(super) sample: Sample,
}

/// Appends to the samples of a run. What cannot be written ends nothing.
pub(super) fn write(path: &Path, texts: &[Text]) {
    let written = Lines::open(path).and_then(|mut lines| {
        for text in texts {
            lines.append(serde_json::to_string(&text.sample)?);
        }
        Ok(())
    });
    if let Err(error) = written {
        tracing::warn!("cannot write {}: {error}; the run goes on without its lines", path.display());
    }
}
