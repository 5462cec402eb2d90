//! The stage `model`: the model to train, its initial weights, and whether it fits into memory.

use kiln_model::{Decoder, Key, Layers, ModelConfig};
use kiln_shard::Optimizer;

use super::data::Found;
use super::env::Setup;
use crate::findings::{Findings, Stage};
use kiln_checkpoint::sharded::{Shapes, parameter_shapes};
use kiln_checkpoint::source::ModelSource;
use kiln_checkpoint::{Checkpoint, shape_line};
use kiln_config::Config;
use kiln_config::device;
use kiln_data as data;
use kiln_sys::files;
use kiln_train::error::Result;
use kiln_train::run;

const MODEL: Stage = Stage::Model;

pub(super) struct Trained {
    pub(super) config: Config,
    pub(super) model: ModelConfig,
    pub(super) optimizer: Optimizer,
    pub(super) shapes: Shapes,
}

pub(super) struct Sources {
    pub(super) resume: Option<Checkpoint>,
    pub(super) weights: Option<ModelSource>,
}

impl Sources {
    pub(super) fn open(setup: &Setup, findings: &mut Findings) -> Self {
        let Some(folder) = setup.resume.as_deref() else {
            let opened = run::open_source(None, &setup.config);
            return Sources { resume: None, weights: findings.take(MODEL, "init.from", opened).flatten() };
        };
        let resume = findings.take(MODEL, "checkpoint", Checkpoint::open(folder));
        let weights = resume.as_ref().map(|resume| run::open_source(Some(resume), &setup.config));
        let weights = weights.and_then(|opened| findings.take(MODEL, "checkpoint", opened).flatten());
        Sources { resume, weights }
    }
}

pub(super) fn examine(
    setup: &Setup,
    sources: &Sources,
    data: &Found,
    findings: &mut Findings,
) -> Option<Trained> {
    let mut config = setup.config.clone();
    config.shorten_warm_up();
    if let Some(device) = &setup.device {
        config.settle(device.defaults());
    }
    let registry = &setup.options.registry;
    let optimizer = findings.take(MODEL, "optimizer", registry.optimizers().make(&config.optim))?;
    let weights = sources.weights.as_ref();
    let model = match data {
        Found::Prepared(info, tokenizer) => {
            run::resolve_model(&config, info, weights, tokenizer, registry.layers())
        }
        // With a vocabulary size other than that of the data, the checks would concern a different model.
        Found::Unusable(None) if weights.is_none() && config.model.vocab_size.is_none() => {
            findings.skip(MODEL, "data, which determine the vocabulary");
            return None;
        }
        Found::Unusable(Some(vocab_size)) => {
            model_before_data(&config, weights, registry.layers(), *vocab_size)
        }
        Found::Unusable(None) | Found::Later => {
            model_before_data(&config, weights, registry.layers(), config.data.vocab_size)
        }
    };
    let model = findings.take(MODEL, "model", model)?;
    findings.take(MODEL, "loss", registry.losses().make(&config.loss, model.vocab_size))?;
    // Used for names and shapes only, so the weights are not initialised.
    let decoder = Decoder::new(registry.layers(), &model, Key::new(0), &device::plain());
    let decoder = findings.take(MODEL, "model", decoder)?;
    let shapes = parameter_shapes(&decoder);
    let parameters = format!("{:.2}M", elements(&shapes) as f64 / 1e6);
    let line = shape_line(&model, parameters);
    findings.ok(MODEL, "model", line.strip_prefix("model: ").unwrap_or(&line));
    let named = findings.take(MODEL, "parameters", run::check_parts(&config, &decoder));
    check_initial_weights(setup, sources, data, &config, &model, &optimizer, findings);
    if let Some(device) = &setup.device {
        let place = setup.options.place.as_ref();
        let recompute = run::settle_recompute(&config, &model, &decoder, &optimizer, device, place);
        config.shard.recompute = recompute.into();
        match run::memory_warnings(&config, &model, &decoder, &optimizer, device, place) {
            Ok(warnings) if warnings.is_empty() => {
                findings.ok(MODEL, "memory", "the minimum that the run needs is free");
            }
            Ok(warnings) => {
                for warning in warnings {
                    let fix = "end other programs, or use a smaller batch or model";
                    findings.warn(MODEL, "memory", warning, fix);
                }
            }
            Err(error) => findings.failed(MODEL, "memory", error),
        }
    }
    named.map(|()| Trained { config, model, optimizer, shapes })
}

pub(super) fn elements(shapes: &Shapes) -> u64 {
    shapes.iter().map(|(_, shape)| shape.iter().map(|size| *size as u64).product::<u64>()).sum()
}

/// Returns the model of a run without prepared data, with the largest vocabulary that the data can have.
fn model_before_data(
    config: &Config,
    source: Option<&ModelSource>,
    layers: &Layers,
    vocab_size: usize,
) -> Result<ModelConfig> {
    let weights = source.map(|source| source.model_of(layers));
    let model = config.resolve_model(weights.as_ref(), Some(vocab_size));
    Ok(model.map_err(kiln_config::ConfigError::invalid)?)
}

fn check_initial_weights(
    setup: &Setup,
    sources: &Sources,
    data: &Found,
    config: &Config,
    model: &ModelConfig,
    optimizer: &Optimizer,
    findings: &mut Findings,
) {
    let Sources { resume, weights } = sources;
    let what = if resume.is_some() { "checkpoint" } else { "init.from" };
    let Some(source) = weights else { return };
    let fits = run::check_source(resume.as_ref(), Some(source), model, optimizer, &setup.options);
    if findings.take(MODEL, what, fits).is_none() {
        return;
    }
    if let Some(checkpoint) = resume {
        if findings.take(MODEL, what, checkpoint.check_files_are_there()).is_none() {
            return;
        }
        if let Found::Prepared(info, tokenizer) = data {
            let position = run::check_position(checkpoint, config, info, tokenizer, &setup.options);
            match findings.take(MODEL, "position", position) {
                None => return,
                Some(changed) if !changed.is_empty() => {
                    let detail = format!(
                        "resumes at another position in the data, as allowed: {}",
                        changed.join(", ")
                    );
                    findings.warned(MODEL, "position", detail);
                }
                Some(_) => {}
            }
        }
        let (folder, step) = (checkpoint.folder().display(), checkpoint.state().step);
        findings.ok(
            MODEL,
            what,
            format!("{folder}, step {step}: the checkpoint fits the run, and its files exist"),
        );
    } else {
        let whole = source.check_weights_are_there(setup.options.registry.layers());
        if findings.take(MODEL, "init.from", whole).is_none() {
            return;
        }
        check_tokenizer(source, data, findings);
        findings.ok(MODEL, "init.from", format!("{}: it fits", source.folder().display()));
    }
}

fn check_tokenizer(source: &ModelSource, data: &Found, findings: &mut Findings) {
    let Found::Prepared(_, tokenizer) = data else { return };
    let Ok(own) = files::read(&source.tokenizer(), files::MAX_WHOLE) else { return };
    if data::tokenizers_differ(&own, tokenizer) {
        let own = source.tokenizer();
        findings.warn(
            MODEL,
            "tokenizer",
            format!("the initial weights have a different tokenizer from the data: {}", own.display()),
            "prepare the data with `kiln data prepare --tokenizer` and this file",
        );
    }
}
