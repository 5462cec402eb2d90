//! Checks whether a resumed run continues at the same position in the same data.
//!
//! A checkpoint records how many samples of the global order have been trained on. The samples follow from the
//! data, the sequence length and the order, which is drawn from the seed. If one of these changes, the same
//! count means a different position: some samples would repeat, and others would be skipped. The batch size
//! does not matter, since the count is in samples.

use super::PositionKey;
use crate::error::{Result, TrainError};
use kiln_checkpoint::Checkpoint;
use kiln_config::Config;
use kiln_data::{self as data, DataInfo};
use kiln_sys::files;

/// Compares the training of `checkpoint` with a resumed run of `config` on `data`, whose tokenizer file has the
/// content `tokenizer`. Returns the differences as text; all of them are among `allowed`.
///
/// # Errors
///
/// If a key differs that is not among `allowed`.
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
