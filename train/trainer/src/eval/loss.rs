//! Loss on validation data.

use std::path::{Path, PathBuf};

use burn::tensor::Device;

use super::evaluate;
use crate::error::EvalError;
use crate::error::Result;
use kiln_checkpoint::sharded::ShardedDecoder;
use kiln_checkpoint::source::ModelSource;
use kiln_config as config;
use kiln_data::{self as data, BatchSource, DataInfo, Samples, Sources, Split, SplitInfo};
use kiln_sys::files::{self, MAX_WHOLE};

/// The part of the validation data to read, and how to read it.
#[derive(Clone, Copy, Debug)]
pub struct ValidationOptions {
    /// Tokens per sequence. The default is the length used in training; for a model not trained by Kiln, the
    /// model's context, but at most 2048. The default is reduced if the data are shorter.
    pub seq_len: Option<usize>,
    /// Number of sequences; 0 for all.
    pub samples: u64,
    /// Sequences per forward pass of one rank.
    pub rows: usize,
}

/// Validation data that fit a model.
#[derive(Debug)]
pub struct Validation {
    source: BatchSource,
    options: ValidationOptions,
}

/// A model's loss on validation data.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ValidationLoss {
    /// Mean of `-log p(token | tokens before)` in nats.
    pub loss: f64,
    /// Number of tokens in the mean.
    pub tokens: u64,
    /// Tokens per sequence: the longest context from which a token is predicted.
    pub seq_len: usize,
}

impl Validation {
    /// Opens the validation split of `data`, or of the data that the model was trained on. `sources` has the sources of
    /// samples that the program adds.
    ///
    /// # Errors
    ///
    /// If the data are missing, too short or changed, have a different tokenizer, or if a sequence exceeds the context.
    pub fn open(
        model: &ModelSource,
        data: Option<&Path>,
        sources: &Sources,
        options: ValidationOptions,
    ) -> Result<Self> {
        let context = model.context_length();
        if let Some(seq_len) = options.seq_len.filter(|seq_len| *seq_len > context) {
            return Err(EvalError::TooLong { what: "--seq-len".to_owned(), tokens: seq_len, context }.into());
        }
        let data = match data {
            Some(data) if !data.exists() => {
                return Err(EvalError::DataMissing { data: data.to_owned() }.into());
            }
            Some(data) => data.to_owned(),
            None => data_of(model)?,
        };
        let info = DataInfo::load(&data)?;
        let tokens = info.validation.tokens;
        // A program makes samples of any length.
        let is_made = info.source.is_some();
        let most = usize::try_from(tokens.saturating_sub(1)).unwrap_or(usize::MAX);
        let most = if is_made { usize::MAX } else { most };
        let seq_len = match options.seq_len {
            Some(seq_len) if seq_len > most => {
                return Err(EvalError::TooFewTokens { data, tokens, seq_len }.into());
            }
            Some(seq_len) => seq_len,
            None => model.seq_len().min(most).max(1),
        };
        let file = Samples::open(&data, Split::Validation, seq_len, sources)?;
        let (tokens, known) = (info.vocab_size, model.model().vocab_size);
        if tokens > known {
            return Err(EvalError::OtherVocabulary { data, tokens, known }.into());
        }
        check_tokenizer(model, &data)?;
        file.check()?;
        Ok(Validation { source: BatchSource::new(file, false, 0)?, options })
    }

    /// Returns the loss of `model`, the same on every rank. Collective.
    /// Calls `progress` after each pass with the passes done and in total.
    pub fn loss(
        &self,
        model: &ShardedDecoder,
        device: &Device,
        progress: impl FnMut(u64, u64),
    ) -> Result<ValidationLoss> {
        let ValidationOptions { samples, rows, .. } = self.options;
        let (loss, tokens) = evaluate(model, device, &self.source, samples, rows, progress)?;
        Ok(ValidationLoss { loss, tokens, seq_len: self.source.seq_len() })
    }
}

/// Fails if the data have a different tokenizer from the model's, so that the loss would be meaningless.
fn check_tokenizer(model: &ModelSource, data: &Path) -> Result<()> {
    let Ok(tokenizer) = data::tokenizer_of(data) else { return Ok(()) };
    let content = data::read_tokenizer_of(data)?;
    let own = model.tokenizer();
    match files::read(&own, MAX_WHOLE) {
        Ok(model) if data::tokenizers_differ(&content, &model) => {
            Err(EvalError::OtherTokenizer { data: tokenizer, model: own }.into())
        }
        _ => Ok(()),
    }
}

/// Finds the data that a model was trained on, as named in the configuration next to the model.
fn data_of(model: &ModelSource) -> Result<PathBuf, EvalError> {
    let checkpoint = model.folder().to_owned();
    let path = checkpoint.join("config.toml");
    if files::open(&path).is_err() {
        return Err(EvalError::NoData { checkpoint });
    }
    let Ok(config) = config::load(&path, &[]) else {
        return Err(EvalError::NoData { checkpoint });
    };
    let data = config.data.path;
    // The start of a relative path is not recorded: try the current folder, and those that contain the model.
    let absolute = checkpoint.canonicalize().unwrap_or_else(|_| checkpoint.clone());
    // An unprepared folder of the same name far above the model may be unrelated.
    let above =
        absolute.ancestors().skip(1).map(|folder| folder.join(&data)).filter(|f| data::is_prepared(f));
    let there: Vec<_> =
        Some(data.clone()).filter(|folder| folder.exists()).into_iter().chain(above).collect();
    let is_own = |folder: &PathBuf| {
        let Ok(info) = DataInfo::load(folder) else { return false };
        info.train.sha256.is_some() && info.train.sha256.as_deref() == model.data_sha256()
    };
    if let Some(own) = there.iter().find(|folder| is_own(folder)) {
        return Ok(own.clone());
    }
    match there.into_iter().next() {
        // Without a recorded hash, trust the name of the folder.
        Some(folder) if model.data_sha256().is_none() => Ok(folder),
        Some(folder) => match DataInfo::load(&folder) {
            Ok(DataInfo { train: SplitInfo { sha256: Some(_), .. }, .. }) => {
                Err(EvalError::OtherData { checkpoint, data: folder })
            }
            _ => Ok(folder),
        },
        None if data.is_relative() => Err(EvalError::DataNotFound { checkpoint, data }),
        None => Err(EvalError::DataGone { checkpoint, data }),
    }
}
