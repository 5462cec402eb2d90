//! Checks whether a resumed run continues at the same position in the same data.
//! A checkpoint counts samples, whose order follows from the data, the sequence length, shuffling and the seed.

use super::PositionKey;
use crate::error::{Result, TrainError};
use kiln_checkpoint::Checkpoint;
use kiln_config::Config;
use kiln_data::{self as data, DataInfo};
use kiln_sys::files;

/// Returns the differences from the training of `checkpoint`, and fails if one is not among `allowed`.
/// `tokenizer` is the content of the data's tokenizer file.
pub(super) fn check(
    checkpoint: &Checkpoint,
    config: &Config,
    data: &DataInfo,
    tokenizer: &[u8],
    allowed: &[PositionKey],
) -> Result<Vec<String>> {
    let mut differences = differences(checkpoint, config, data);
    differences.extend(other_tokenizer(checkpoint, config, tokenizer));
    let refused = differences.iter().any(|(key, _)| !allowed.contains(key));
    let (keys, differences): (Vec<_>, Vec<_>) = differences.into_iter().unzip();
    if !refused {
        return Ok(differences);
    }
    let path = checkpoint.folder().to_owned();
    Err(TrainError::OtherPosition { path, keys, differences })
}

/// Compares the tokenizers: with a different tokenizer, the same ids would mean different text to the model.
fn other_tokenizer(
    checkpoint: &Checkpoint,
    config: &Config,
    tokenizer: &[u8],
) -> Option<(PositionKey, String)> {
    let own = files::read(&checkpoint.tokenizer(), files::MAX_WHOLE).ok()?;
    let here = data::tokenizer_of(&config.data.path).ok()?;
    data::tokenizers_differ(&own, tokenizer).then(|| {
        let what = format!("the tokenizer in {} is not the checkpoint's", here.display());
        (PositionKey::Data, what)
    })
}

fn differences(checkpoint: &Checkpoint, config: &Config, data: &DataInfo) -> Vec<(PositionKey, String)> {
    let state = checkpoint.state();
    // An imported model has not been trained on any of this data.
    if state.next_sample == 0 {
        return Vec::new();
    }
    let saved = checkpoint.manifest().config.as_ref();
    let shuffled = saved.and_then(|config| config.get("data")?.get("shuffle")?.as_bool());
    let short = |sum: &str| format!("{}…", sum.chars().take(12).collect::<String>());
    let values = [
        (PositionKey::SeqLen, Some(checkpoint.seq_len().to_string()), Some(config.data.seq_len.to_string())),
        (
            PositionKey::Shuffle,
            shuffled.map(|shuffled| shuffled.to_string()),
            Some(config.data.shuffle.to_string()),
        ),
        (PositionKey::Seed, Some(state.seed.to_string()), Some(config.train.seed.to_string())),
        (PositionKey::Data, state.data_sha256.as_deref().map(short), data.train.sha256.as_deref().map(short)),
    ];
    // A value that is unknown on one side does not count as a difference.
    let differs = |(key, then, now): (PositionKey, Option<String>, Option<String>)| {
        let (then, now) = (then?, now?);
        let what = match key {
            PositionKey::Data => "the SHA-256 of the training data".to_owned(),
            key => key.to_string(),
        };
        (then != now).then(|| (key, format!("{what} was {then} and is {now} now")))
    };
    values.into_iter().filter_map(differs).collect()
}
