//! Prepared data for a run: found, or prepared from text first.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use crate::config::DataSection;
use crate::data::{self, DataError, DataInfo, PrepareOptions, Progress, TokenizerSource};
use crate::metrics::say;

/// The data that `section` names. If `data.path` does not exist yet and `data.text` names some
/// text, it is prepared first, unless `stop` becomes true. If both are there, the folder must have been
/// prepared from that text.
///
/// A run that goes on names the SHA-256 of the tokens it was `trained_on`: it goes on with them, and a
/// text that has changed since is only worth a warning.
pub fn open(
    section: &DataSection,
    seed: u64,
    trained_on: Option<&str>,
    stop: &AtomicBool,
) -> Result<DataInfo, DataError> {
    if section.text.is_empty() {
        return DataInfo::load(&section.path);
    }
    let options = PrepareOptions {
        inputs: section.text.clone(),
        out: section.path.clone(),
        tokenizer: TokenizerSource::Train { vocab_size: section.vocab_size },
        validation_fraction: section.validation_fraction,
        seed,
    };
    if !section.path.join("data.json").exists() {
        match prepare(&options, stop) {
            // Another run that has started at the same time: its data are as good, if they are the same.
            Err(DataError::AlreadyPrepared { .. }) => {
                say("data: another start has prepared them meanwhile");
            }
            prepared => return prepared,
        }
    }
    let info = DataInfo::load(&section.path)?;
    let path = section.path.display();
    match data::differences(&options)? {
        None => tracing::warn!(
            "{path} does not say what it was prepared from, as another program or an older build made \
             it: it is used as it is, whatever data.text says. Leave out data.text to say so yourself"
        ),
        Some(differences) if differences.is_empty() => {}
        Some(differences) if trained_on.is_some() && trained_on == info.train.sha256.as_deref() => {
            tracing::warn!(
                "{path} was prepared from something else than data.text and its options say now ({}); \
                 the run goes on with the data that it was trained on",
                differences.join("; ")
            );
        }
        Some(differences) => {
            let path = section.path.clone();
            return Err(DataError::PreparedFromOther { path, differences });
        }
    }
    Ok(info)
}

/// Prepares data and tells how it goes, until `stop` becomes true.
pub fn prepare(options: &PrepareOptions, stop: &AtomicBool) -> Result<DataInfo, DataError> {
    let info = data::prepare_unless(stop, options, &mut |progress| match progress {
        Progress::ReadingStreams { streams } => {
            let what =
                if streams == 1 { "an input that is a pipe" } else { "inputs that are pipes" };
            say(&format!("data: reading {what}, to the end"));
        }
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
