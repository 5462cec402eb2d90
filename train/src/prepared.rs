//! Prepared data for a run: found, or prepared from text first.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use crate::config::DataSection;
use crate::data::{self, DataError, DataInfo, PrepareOptions, Progress, TokenizerSource};
use crate::metrics::say;

/// The data that `section` names. If `data.path` does not exist yet and `data.text` names some
/// text, it is prepared first, unless `stop` becomes true.
pub fn open(section: &DataSection, seed: u64, stop: &AtomicBool) -> Result<DataInfo, DataError> {
    if section.text.is_empty() || section.path.join("data.json").exists() {
        return DataInfo::load(&section.path);
    }
    let options = PrepareOptions {
        inputs: section.text.clone(),
        out: section.path.clone(),
        tokenizer: TokenizerSource::Train { vocab_size: section.vocab_size },
        validation_fraction: section.validation_fraction,
        seed,
    };
    prepare(&options, stop)
}

/// Prepares data and tells how it goes, until `stop` becomes true.
pub fn prepare(options: &PrepareOptions, stop: &AtomicBool) -> Result<DataInfo, DataError> {
    let info = data::prepare_unless(stop, options, &mut |progress| match progress {
        Progress::TrainingTokenizer { input_bytes } => {
            say(&format!("data: training a tokenizer on {:.1} MB of text", megabytes(input_bytes)));
        }
        Progress::Encoding { text_bytes, tokens, .. } => {
            say(&format!("data: encoded {:.1} MB, {tokens} tokens", megabytes(text_bytes)));
        }
    })?;
    say(&format!(
        "data: {} documents, {} training and {} validation tokens, vocabulary {} -> {}",
        info.documents,
        info.train.tokens,
        info.validation.tokens,
        info.vocab_size,
        options.out.display()
    ));
    Ok(info)
}

fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}

/// `builtin:…` and paths alike, as the data module takes them.
pub fn inputs(arguments: &[String]) -> Vec<PathBuf> {
    arguments.iter().map(PathBuf::from).collect()
}
