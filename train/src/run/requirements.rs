//! What has to fit together before a run starts: the configuration's parameters, the weights to start from, the
//! position in the data, the model. A start asks, and so does `kiln check`.

use kiln_model::{Decoder, ModelConfig};
use kiln_shard::Optimizer;

use super::{RunOptions, position};
use crate::checkpoint::{Architecture, Checkpoint, CheckpointError, SavedOptimizer};
use crate::config::{Config, ConfigError};
use crate::data::{self, DataInfo, Tokenizer};
use crate::error::Result;
use crate::optimizers::check_groups;
use crate::sharded::{parameter_names, parameter_shapes};
use crate::source::ModelSource;

/// Fails unless the parameters that `config` names are some of `decoder`.
pub(crate) fn check_parts(config: &Config, decoder: &Decoder) -> Result<()> {
    if !config.train.freeze.is_empty() {
        check_freeze(&config.train.freeze, &parameter_names(decoder))?;
    }
    Ok(check_groups(&config.optim.groups, &parameter_shapes(decoder))?)
}

/// Fails unless `model` can start from these weights, and `optimizer` go on with the state beside them.
pub(crate) fn check_sources(
    resume: Option<&Checkpoint>,
    init: Option<&ModelSource>,
    model: &ModelConfig,
    optimizer: &Optimizer,
    options: &RunOptions,
) -> Result<()> {
    let architecture = &Architecture::of_model(model);
    if let Some(checkpoint) = resume {
        checkpoint.require_optimizer(&SavedOptimizer::of(optimizer))?;
        allow_parts(checkpoint.require_architecture(architecture), options)?;
    }
    if let Some(source) = init {
        allow_parts(source.require_architecture(architecture), options)?;
    }
    // With weights that may be missing, names and shapes decide when they are loaded.
    if options.allow_missing.is_empty() {
        let resume = resume.cloned().map(Box::new).map(ModelSource::Checkpoint);
        for source in resume.iter().chain(init) {
            source.check_model(model)?;
        }
    }
    Ok(())
}

/// How the position in the data differs from that of `checkpoint`, as far as `options` allow it.
pub(crate) fn check_position(
    checkpoint: &Checkpoint,
    config: &Config,
    data: &DataInfo,
    tokenizer: &[u8],
    options: &RunOptions,
) -> Result<Vec<String>> {
    position::check(checkpoint, config, data, tokenizer, &options.allow_changed)
}

/// Fails if a name to freeze is none, which is easily a slip of the pen, or if nothing is left to train.
fn check_freeze(freeze: &[String], names: &[String]) -> Result<(), ConfigError> {
    let frozen = |name: &String| freeze.iter().any(|prefix| name.starts_with(prefix.as_str()));
    let mut problems: Vec<_> = freeze
        .iter()
        .filter(|prefix| !names.iter().any(|name| name.starts_with(prefix.as_str())))
        .map(|prefix| {
            let some: Vec<_> = names.iter().take(3).map(String::as_str).collect();
            format!(
                "train.freeze: no parameter starts with \"{prefix}\"; they are called {}, …",
                some.join(", ")
            )
        })
        .collect();
    if names.iter().all(frozen) {
        problems.push(
            "train.freeze leaves nothing to train: name fewer parameters, such as \"layers.0.\"".to_owned(),
        );
    }
    if problems.is_empty() { Ok(()) } else { Err(ConfigError::Invalid { problems }) }
}

/// The model of the run: that of the weights to start from if the configuration names none; its
/// vocabulary is the tokenizer's unless the configuration names one.
pub(crate) fn resolve_model(
    config: &Config,
    data: &DataInfo,
    init: Option<&ModelSource>,
    tokenizer: &[u8],
) -> Result<ModelConfig> {
    let invalid = |problem: String| ConfigError::Invalid { problems: vec![problem] };
    // Data from another program may state fewer ids than its tokenizer has.
    let path = data::tokenizer_of(&config.data.path)?;
    let tokenizer = Tokenizer::from_file(tokenizer.to_vec(), &path)?;
    let tokens = data.vocab_size.max(tokenizer.vocab_size());
    let model = match init {
        Some(source) if config.takes_model_from_weights() => source.model().clone(),
        _ => config.model.resolve(Some(tokens)).map_err(invalid)?,
    };
    model.validate().map_err(|error| invalid(error.to_string()))?;
    if tokens > model.vocab_size {
        let problem = invalid(format!(
            "the tokenizer in {} has {tokens} tokens, but model.vocab_size is {}: raise \
             model.vocab_size to at least {tokens}, or leave it out",
            config.data.path.display(),
            model.vocab_size,
        ));
        return Err(problem.into());
    }
    Ok(model)
}

/// Fails with what `required` says of other parts, unless the user has allowed for them.
fn allow_parts(required: Result<(), CheckpointError>, options: &RunOptions) -> Result<(), CheckpointError> {
    match required {
        Err(error @ CheckpointError::OtherArchitecture { .. }) if options.allow_other_parts => {
            tracing::warn!("{error}; its weights are taken by name and shape all the same");
            Ok(())
        }
        Err(CheckpointError::OtherArchitecture { path, objection }) => {
            let allow = "take its weights by name and shape with --allow-other-parts";
            let objection = format!("{objection}, {allow}");
            Err(CheckpointError::OtherArchitecture { path, objection })
        }
        other => other,
    }
}
