//! Checks, for runs and `kiln check`, that the parts of a run fit together before the run starts.

use kiln_model::{Decoder, Layers, ModelConfig};
use kiln_shard::Optimizer;

use super::{RunOptions, position};
use crate::error::{Result, TrainError};
use kiln_checkpoint::sharded::{parameter_names, parameter_shapes};
use kiln_checkpoint::source::ModelSource;
use kiln_checkpoint::{Architecture, Checkpoint, CheckpointError, SavedOptimizer};
use kiln_config::optimizers::check_groups;
use kiln_config::{Config, ConfigError, LossSection};
use kiln_data::{self as data, DataInfo, Tokenizer};
use kiln_sys::files;

/// Fails unless all parameters named in `config` exist in `decoder`.
pub fn check_parts(config: &Config, decoder: &Decoder) -> Result<()> {
    let names = parameter_names(decoder);
    config.train.check_trained(&names)?;
    let adapted = names.iter().filter_map(|name| name.strip_suffix(".lora.a"));
    if let Some(lora) = config.lora.adapters()
        && let Some(target) = lora.unused_target(adapted)
    {
        let problem = format!(
            "lora.targets: \"{target}\" selects no map that can have an adapter; maps are named like \"q_proj\" and \
             \"layers.0.attention.q_proj\""
        );
        return Err(ConfigError::invalid(problem).into());
    }
    Ok(check_groups(&config.optim.groups, &parameter_shapes(decoder))?)
}

/// Opens the source of the model and weights: the checkpoint to resume from, or else `init.from` if it is set.
pub fn open_source(
    resume: Option<&Checkpoint>,
    config: &Config,
) -> Result<Option<ModelSource>, CheckpointError> {
    match resume {
        Some(checkpoint) => Ok(Some(ModelSource::from_checkpoint(checkpoint.clone(), config.init_from())?)),
        None => config.init_from().map(ModelSource::open).transpose(),
    }
}

/// Fails unless `model` can start from `source` and, in a resumed run, `optimizer` from the checkpoint.
pub fn check_source(
    resume: Option<&Checkpoint>,
    source: Option<&ModelSource>,
    model: &ModelConfig,
    optimizer: &Optimizer,
    options: &RunOptions,
) -> Result<()> {
    if let Some(checkpoint) = resume {
        checkpoint.require_optimizer(&SavedOptimizer::of(optimizer))?;
    }
    if model.lora.is_some() && !options.allow_missing.is_empty() {
        return Err(TrainError::usage(
            "--allow-missing cannot be used with [lora]: checkpoints contain the adapters alone, so the model must have \
             all other weights"
                .to_owned(),
        ));
    }
    if let Some(source) = source {
        allow_parts(source.require_architecture(&Architecture::from_model(model)), options)?;
        source.check_model(model, &options.allow_missing)?;
    }
    Ok(())
}

/// Fails if a model of `loss.frozen` reads text differently from `tokenizer`, or shorter texts than `seq_len` tokens.
pub(super) fn check_frozen(loss: &LossSection, tokenizer: &[u8], seq_len: usize) -> Result<()> {
    for (name, path) in &loss.frozen {
        let source = ModelSource::open(path)?;
        let problem = match files::read(&source.tokenizer(), files::MAX_WHOLE) {
            Ok(own) if data::tokenizers_differ(&own, tokenizer) => {
                "has another tokenizer than the data: name a model with the same tokenizer".to_owned()
            }
            _ if source.context_length() < seq_len => {
                let context = source.context_length();
                format!("reads at most {context} tokens, and data.seq_len is {seq_len}: lower data.seq_len")
            }
            _ => continue,
        };
        let problem = format!("loss.frozen.{name}: the model in {} {problem}", path.display());
        return Err(ConfigError::invalid(problem).into());
    }
    Ok(())
}

/// Returns changes of the position in the data since `checkpoint`; fails if `options` do not allow one.
pub fn check_position(
    checkpoint: &Checkpoint,
    config: &Config,
    data: &DataInfo,
    tokenizer: &[u8],
    options: &RunOptions,
) -> Result<Vec<String>> {
    position::check(checkpoint, config, data, tokenizer, &options.allow_changed)
}

/// Returns the model that a run would train, for commands such as `kiln plan`. The vocabulary is that of prepared
/// data, or else `data.vocab_size`. An `init.from` that cannot be opened matters only if `[model]` is incomplete.
pub fn model_of_run(config: &Config, layers: &Layers) -> Result<ModelConfig> {
    let (source, unopened) = match config.init_from().map(ModelSource::open) {
        Some(Ok(source)) => (Some(source), None),
        Some(Err(error)) => (None, Some(error)),
        None => (None, None),
    };
    let path = &config.data.path;
    let model = if !path.as_os_str().is_empty() && path.join("data.json").exists() {
        let (data, tokenizer) = (DataInfo::load(path)?, data::read_tokenizer_of(path)?);
        resolve_model(config, &data, source.as_ref(), &tokenizer, layers)
    } else {
        let weights = source.as_ref().map(|source| source.model_of(layers));
        let vocab_size = Some(config.data.vocab_size);
        config.resolve_model(weights.as_ref(), vocab_size).map_err(TrainError::usage)
    };
    // If the section is incomplete without the weights, report why the weights could not be opened.
    model.map_err(|error| unopened.map_or(error, TrainError::from))
}

/// Returns the model of a run. `source` completes unset keys; without it, the tokenizer sets the vocabulary.
pub fn resolve_model(
    config: &Config,
    data: &DataInfo,
    source: Option<&ModelSource>,
    tokenizer: &[u8],
    layers: &Layers,
) -> Result<ModelConfig> {
    let invalid = |problem: String| ConfigError::Invalid { problems: vec![problem] };
    // Data prepared by another program may state a smaller vocabulary than the tokenizer's.
    let path = data::tokenizer_of(&config.data.path)?;
    let tokenizer = Tokenizer::from_file(tokenizer.to_vec(), &path)?;
    let tokens = data.vocab_size.max(tokenizer.vocab_size());
    let weights = source.map(|source| source.model_of(layers));
    let model = config.resolve_model(weights.as_ref(), Some(tokens)).map_err(invalid)?;
    model.validate().map_err(|error| invalid(error.to_string()))?;
    if tokens > model.vocab_size {
        let (data, known) = (config.data.path.display(), model.vocab_size);
        let problem = match source.map(ModelSource::folder) {
            Some(folder) => format!(
                "the tokenizer in {data} has {tokens} tokens, but the model in {} knows {known}: prepare the data \
                 with the tokenizer of the model, or start from another model",
                folder.display()
            ),
            None => format!(
                "the tokenizer in {data} has {tokens} tokens, but model.vocab_size is {known}: raise \
                 model.vocab_size to at least {tokens}, or remove it"
            ),
        };
        return Err(invalid(problem).into());
    }
    Ok(model)
}

/// Turns the error about a different architecture into a warning if `options` allow a different one.
fn allow_parts(required: Result<(), CheckpointError>, options: &RunOptions) -> Result<(), CheckpointError> {
    match required {
        Err(error @ CheckpointError::OtherArchitecture { .. }) if options.allow_other_parts => {
            tracing::warn!("{error}; its weights are loaded by name and shape anyway");
            Ok(())
        }
        Err(CheckpointError::OtherArchitecture { path, objection }) => {
            let allow = "load its weights by name and shape with --allow-other-parts";
            let objection = format!("{objection}, {allow}");
            Err(CheckpointError::OtherArchitecture { path, objection })
        }
        other => other,
    }
}
