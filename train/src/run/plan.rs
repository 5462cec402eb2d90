//! What a run settles once, before its ranks start.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use kiln_model::layers::TokenLoss;
use kiln_model::{Decoder, Key, ModelConfig};
use kiln_shard::Optimizer;
use serde::{Deserialize, Serialize};

use super::folder::{self, Claim, Found, Lock};
use super::startup::StartTimes;
use super::{RunOptions, memory, position};
use crate::checkpoint::{
    self, Architecture, Checkpoint, CheckpointError, HeldFolder, Keep, SaveOptions, SavedOptimizer,
};
use crate::config::{self, Config, ConfigError, ModelSection};
use crate::data::{self, DataInfo, Split, TokenFile, Tokenizer};
use crate::debug::{DebugOptions, Desk};
use crate::device::{self, Peak, ResolvedDevice};
use crate::error::{Result, TrainError};
use crate::files;
use crate::metrics::say;
use crate::optimizers::check_groups;
use crate::prepared;
use crate::process;
use crate::registry::Registry;
use crate::sharded::{parameter_names, parameter_shapes};
use crate::source::ModelSource;
use crate::weights::AllowMissing;

/// What every rank of a run knows; nothing in it is open any more.
pub(crate) struct Plan {
    /// What rank 0 tells the other processes of it.
    pub(crate) message: PlanMessage,
    pub(crate) config: Config,
    pub(crate) model: ModelConfig,
    /// The file of the data's tokenizer, as it was at the start.
    pub(crate) tokenizer: Arc<[u8]>,
    /// The run folder, where no symbolic link leads to it.
    pub(crate) out: PathBuf,
    pub(crate) resume: Option<Checkpoint>,
    /// Of this process.
    pub(crate) device: ResolvedDevice,
    /// What the decoder can be made of, and what is logged of a step.
    pub(crate) registry: Registry,
    /// What updates it.
    pub(crate) optimizer: Optimizer,
    /// What it minimises; `None` for the cross-entropy.
    pub(crate) loss: Option<TokenLoss>,
    /// Weights that checkpoints may lack.
    pub(crate) allow_missing: AllowMissing,
    /// What looks into the run.
    pub(crate) debug: DebugOptions,
    /// The prompts of this process.
    pub(crate) desk: Arc<Desk>,
    /// Asks this process to save a checkpoint and stop.
    pub(crate) stop: Arc<AtomicBool>,
    /// How long the start takes, on rank 0.
    pub(crate) start: StartTimes,
    /// Keeps other runs out of the folder for as long as this process works on it.
    lock: Lock,
    /// What rank 0 does to the folder when the run begins; `None` in the processes of other ranks.
    pub(crate) claim: Option<Claim>,
}

/// A plan in a form that can be sent; each rank makes the same one of it again.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct PlanMessage {
    /// The configuration as TOML, with its model complete.
    pub(crate) config: String,
    pub(crate) data: DataInfo,
    /// The run folder as it was named: links may lead elsewhere on another machine.
    out: PathBuf,
    resume: Option<PathBuf>,
    /// Of all ranks together.
    pub(crate) peak: Peak,
    /// Compute threads of each rank.
    pub(crate) threads: usize,
}

/// Checks everything that can be checked before work starts, prepares data, and settles what is
/// open in `config`. Looks at the disk and writes to it: for one rank alone.
pub(super) fn make(
    asked: &Config,
    options: &RunOptions,
    device: &ResolvedDevice,
    mut start: StartTimes,
) -> Result<Plan> {
    let mut config = asked.clone();
    let settled = config.settle(device.defaults());
    let shortened = config.shorten_warm_up();
    // What was found may have changed until the folder is this run's, which is known by what was asked for.
    let (draft, lock, claim) = loop {
        let find = || folder::find(asked, options);
        let draft = Draft::make(&config, find()?, options, device, &mut start)?;
        if let Some((lock, claim)) = draft.found.claim(options, &config.comm, find)? {
            break (draft, lock, claim);
        }
    };
    let Draft { found, resume, data, tokenizer, model, optimizer, loss, warnings, other_init, changed } =
        draft;
    for warning in warnings {
        tracing::warn!("{warning}");
    }
    for note in other_init.iter().chain(&shortened) {
        say(note);
    }
    if !settled.is_empty() {
        say(&format!("as suits the device: {}", settled.join(", ")));
    }
    config.model = ModelSection::from_model(&model);
    let config_text = toml::to_string(&config)
        .map_err(|error| TrainError::usage(format!("the configuration cannot be written: {error}")))?;
    if let Some(checkpoint) = &resume {
        say(&format!("resuming from {}", checkpoint.folder().display()));
        for difference in differences(checkpoint, &config) {
            say(&difference);
        }
        if !changed.is_empty() {
            say(&format!("at another position in the data, as allowed: {}", changed.join(", ")));
        }
    }
    let ranks = config.train.ranks;
    let place = options.place.as_ref();
    let sharing = place.map_or(ranks, device::ranks_sharing_cores);
    let threads = device::threads_per_rank(&config.device, sharing);
    let peak = match config.device.peak_tflops {
        Some(tflops) => Peak::given(tflops * 1e12),
        None => start
            .time("peak", || device.peak(config.precision.compute(), place, ranks, threads))
            .map_err(TrainError::threads("threads that measure the peak of this machine"))?,
    };
    let message = PlanMessage {
        config: config_text,
        data,
        out: found.named,
        resume: resume.as_ref().map(|checkpoint| checkpoint.folder().to_owned()),
        peak,
        threads,
    };
    let (out, claim, device) = (found.out, Some(claim), device.clone());
    Ok(Plan {
        message,
        config,
        model,
        tokenizer,
        out,
        resume,
        lock,
        claim,
        device,
        registry: options.registry.clone(),
        optimizer,
        loss,
        allow_missing: options.allow_missing.clone(),
        debug: options.debug.clone(),
        desk: Arc::default(),
        stop: options.stop.clone(),
        start,
    })
}

/// How `config` differs from the run that `checkpoint` is of in what the device may have settled: it changes
/// the numbers of a run, and not what they mean.
fn differences(checkpoint: &Checkpoint, config: &Config) -> Vec<String> {
    // One that an older build has written may have other keys.
    let Ok(before) = config::load(&checkpoint.folder().join("config.toml"), &[]) else {
        return Vec::new();
    };
    let mut differences = Vec::new();
    let (was, is) = (before.precision.compute(), config.precision.compute());
    if was != is {
        differences.push(format!("precision.compute was \"{was}\" and is \"{is}\" from here on"));
    }
    let (was, is) = (before.micro_batch(), config.micro_batch());
    if was != is {
        differences.push(format!("train.micro_batch was {was} and is {is} from here on"));
    }
    differences
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

/// What a start would do, before it has touched its folder.
struct Draft {
    found: Found,
    resume: Option<Checkpoint>,
    data: DataInfo,
    tokenizer: Arc<[u8]>,
    model: ModelConfig,
    optimizer: Optimizer,
    loss: Option<TokenLoss>,
    /// What is to be said about memory.
    warnings: Vec<String>,
    /// What is to be said if the weights to start from belong to another tokenizer.
    other_init: Option<String>,
    /// What differs from the checkpoint, as is allowed.
    changed: Vec<String>,
}

impl Draft {
    fn make(
        config: &Config,
        found: Found,
        options: &RunOptions,
        device: &ResolvedDevice,
        start: &mut StartTimes,
    ) -> Result<Self> {
        let resume = found.resume.as_deref().map(Checkpoint::open).transpose()?;
        let init = match config.init.from.as_os_str().is_empty() {
            true => None,
            false => Some(ModelSource::open(&config.init.from)?),
        };
        // Before hours of work on data, with what is known of the model by then: the least vocabulary
        // decides, and what would help goes by the one that there will be.
        let known = |vocab_size| match &init {
            Some(source) if config.takes_model_from_weights() => Some(source.model().clone()),
            _ => config.model.resolve(Some(vocab_size)).ok().filter(|model| model.validate().is_ok()),
        };
        let place = options.place.as_ref();
        let optimizer = options.registry.optimizers().make(&config.optim)?;
        options.registry.losses().find(&config.loss)?;
        // For names and shapes: nothing is initialised.
        let decoder =
            |model: &_| Decoder::new(options.registry.layers(), model, Key::new(0), &device::plain());
        let check = |model: &ModelConfig| -> Result<_> {
            Ok(memory::check(config, model, &decoder(model)?, &optimizer, device, place)?)
        };
        if let Some(Err(least)) = known(1).map(|model| check(&model)) {
            let full = known(config.data.vocab_size).map(|model| check(&model));
            return Err(full.and_then(Result::err).unwrap_or(least));
        }
        let trained_on = resume.as_ref().and_then(|from| from.state().data_sha256.as_deref());
        let open = || prepared::open(&config.data, config.train.seed, trained_on, &options.stop);
        let data = start.time("data", || process::in_pool(open));
        let data = data.map_err(TrainError::threads("threads that look at the data"))??;
        let tokenizer = data::read_tokenizer_of(&config.data.path)?;
        let model = resolve_model(config, &data, init.as_ref(), &tokenizer)?;
        let loss = options.registry.losses().make(&config.loss, model.vocab_size)?;
        let decoder = decoder(&model)?;
        let warnings = check(&model)?;
        check_parts(config, &decoder)?;
        check_sources(resume.as_ref(), init.as_ref(), &model, &optimizer, options)?;
        for split in [Split::Train, Split::Validation] {
            TokenFile::open(&config.data.path, split, config.data.seq_len)?.check()?;
        }
        let changed = match &resume {
            Some(checkpoint) => check_position(checkpoint, config, &data, &tokenizer, options)?,
            None => Vec::new(),
        };
        let other_init = init.filter(|_| resume.is_none()).and_then(|source| {
            let own = source.tokenizer();
            let content = files::read(&own, files::MAX_WHOLE).ok()?;
            data::are_other_tokenizers(&content, &tokenizer).then(|| {
                format!(
                    "the data in {} have another tokenizer than the weights to start from ({}): \
                     to the model, their token ids mean other text",
                    config.data.path.display(),
                    own.display()
                )
            })
        });
        let tokenizer = tokenizer.into();
        Ok(Draft { found, resume, data, tokenizer, model, optimizer, loss, warnings, other_init, changed })
    }
}

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

impl Plan {
    /// How the run saves.
    pub(super) fn save_options(&self) -> SaveOptions {
        let section = &self.config.checkpoint;
        SaveOptions {
            folder: self.checkpoints(),
            format: section.format,
            background: section.background,
            keep: Keep { newest: section.keep, every: section.keep_every },
            timeout: section.timeout(),
            held: self.held(),
        }
    }

    /// Folder of the run's checkpoints.
    pub(crate) fn checkpoints(&self) -> PathBuf {
        checkpoint::folder_of_run(&self.out)
    }

    /// What shows whether the run folder is still this run's.
    pub(crate) fn held(&self) -> Option<HeldFolder> {
        self.lock.held()
    }

    /// Key of everything random in the run.
    pub(crate) fn key(&self) -> Key {
        Key::new(self.config.train.seed)
    }
}

impl PlanMessage {
    /// The plan that rank 0 has made.
    pub(super) fn into_plan(self, options: &RunOptions, device: &ResolvedDevice) -> Result<Plan> {
        let unreadable = |problem: String| TrainError::Rank0 { message: problem, usage: false };
        let config: Config = toml::from_str(&self.config).map_err(|error| unreadable(error.to_string()))?;
        device.check_precision(config.precision.compute())?;
        // Complete in this configuration, so that every rank reads the same digits.
        let model = config.model.resolve(None).map_err(unreadable)?;
        let tokenizer = data::read_tokenizer_of(&config.data.path)?.into();
        let out = folder::resolve(&self.out);
        let lock = Lock::share(&out)?;
        let resume = self.resume.as_deref().map(Checkpoint::open).transpose()?;
        let (allow_missing, debug, stop) =
            (options.allow_missing.clone(), options.debug.clone(), options.stop.clone());
        let registry = options.registry.clone();
        let optimizer = registry.optimizers().make(&config.optim)?;
        let loss = registry.losses().make(&config.loss, model.vocab_size)?;
        let (message, claim, device) = (self, None, device.clone());
        Ok(Plan {
            message,
            config,
            model,
            tokenizer,
            out,
            resume,
            lock,
            claim,
            device,
            registry,
            optimizer,
            loss,
            allow_missing,
            debug,
            desk: Arc::default(),
            stop,
            start: StartTimes::default(),
        })
    }
}
