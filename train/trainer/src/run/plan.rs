//! The plan of a run, made once before its ranks start.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use kiln_model::verify::layers::try_first_block;
use kiln_model::{Decoder, Key, Layers, ModelConfig};
use kiln_shard::{Accumulate, Optimizer, Recompute};
use serde::{Deserialize, Serialize};

use super::folder::{self, Claim, Found, Lock};
use super::inherited::Inherited;
use super::observe::AttachedTools;
use super::requirements::{
    check_frozen, check_parts, check_position, check_source, open_source, resolve_model,
};
use super::startup::StartTimes;
use super::{RunOptions, memory, prompts};
use crate::error::{Result, TrainError};
use crate::eval::TokenPair;
use crate::losses::Loss;
use crate::metrics::print_line;
use crate::prepared;
use crate::process;
use crate::registry::Registry;
use kiln_checkpoint::source::ModelSource;
use kiln_checkpoint::weights::AllowMissing;
use kiln_checkpoint::{self as checkpoint, BaseModel, Checkpoint, HeldFolder, Keep, SaveOptions};
use kiln_config::device::{self, Peak, ResolvedDevice};
use kiln_config::schedule;
use kiln_config::{self as config, Config, ConfigError, ModelSection, ShardSection};
use kiln_data::{self as data, DataInfo, Samples, Split};

/// The plan of a run, which every rank has. The files of the initial weights stay open.
pub struct Plan {
    /// The part of the plan that rank 0 sends to the other processes.
    pub message: PlanMessage,
    pub config: Config,
    pub model: ModelConfig,
    /// Content of the data's tokenizer file, as read at the start.
    pub tokenizer: Arc<[u8]>,
    /// The run folder, with symbolic links resolved.
    pub out: PathBuf,
    pub resume: Option<Checkpoint>,
    /// The source of the model and its weights: the checkpoint of `resume`, or `init.from`.
    pub source: Option<ModelSource>,
    /// The model that the adapters of `[lora]` change, which checkpoints do not contain.
    pub base: Option<BaseModel>,
    /// Files and settings inherited from `source`.
    pub inherited: Inherited,
    /// The device of this process.
    pub device: ResolvedDevice,
    /// The parts that the decoder can be built from, and the logged metrics.
    pub registry: Registry,
    pub optimizer: Optimizer,
    /// The loss to minimise.
    pub loss: Loss,
    /// Weights that may be missing from checkpoints.
    pub allow_missing: AllowMissing,
    /// The tools that inspect this process; attached once the plan is made.
    pub tools: Option<Box<dyn AttachedTools>>,
    /// Set to request that this process save a checkpoint and stop.
    pub stop: Arc<AtomicBool>,
    /// Durations of the start's stages, on rank 0.
    pub start: StartTimes,
    lock: Lock,
    /// Rank 0's changes to the folder when the run begins; `None` in the processes of other ranks.
    pub claim: Option<Claim>,
}

/// A plan in a form that can be sent; each rank rebuilds the same plan from it.
#[derive(Clone, Serialize, Deserialize)]
pub struct PlanMessage {
    /// The configuration as TOML, with its model complete.
    pub config: String,
    pub data: DataInfo,
    /// The run folder as the user named it, because links may differ on other machines.
    out: SentPath,
    resume: Option<SentPath>,
    /// Prompts with answers. Evaluations also report the loss on these answers.
    pub answers: Vec<TokenPair>,
    /// The peak FLOP/s of all ranks' devices together, for `mfu`; `None` if it is not reliably known.
    pub peak: Option<Peak>,
    /// Compute threads of each rank.
    pub threads: usize,
    /// Number of times that the loss runs the model in a pass.
    runs: usize,
}

/// A path in a message, as bytes, because file names need not be UTF-8.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct SentPath(Vec<u8>);

impl SentPath {
    fn new(path: &Path) -> Self {
        SentPath(path.as_os_str().as_bytes().to_owned())
    }

    fn path(&self) -> &Path {
        Path::new(OsStr::from_bytes(&self.0))
    }
}

/// Makes the plan: checks the run, prepares data, and resolves unset values.
/// Reads and writes the disk, so only one rank may call it.
pub(super) fn make(
    asked: &Config,
    options: &RunOptions,
    device: &ResolvedDevice,
    mut start: StartTimes,
) -> Result<Plan> {
    let mut config = asked.clone();
    // A run folder means one checkpoint, for all ranks and for a resumed run.
    for (name, path) in &mut config.loss.frozen {
        let named = |error| ConfigError::invalid(format!("loss.frozen.{name}: {error}"));
        *path = ModelSource::open(path).map_err(named)?.folder().to_owned();
    }
    let mut settled = config.settle(device.defaults());
    let shortened = config.shorten_warm_up();
    // The folder may change until this run claims it. The configuration as requested identifies the run.
    let (draft, lock, claim) = loop {
        let find = || folder::find(asked, options);
        let found = find()?;
        if let Some(earlier) = found.earlier(options, &config.data.path) {
            print_line(&format!(
                "{} holds an earlier run: this run goes to {}",
                earlier.display(),
                found.named.display()
            ));
        }
        let draft = Draft::make(&config, found, options, device, &mut start)?;
        if let Some((lock, claim)) = draft.found.claim(options, &config.comm, find)? {
            break (draft, lock, claim);
        }
    };
    let Draft { found, resume, source, inherited, data, tokenizer, answers, model, optimizer, loss, .. } =
        draft;
    for warning in draft.warnings {
        tracing::warn!("{warning}");
    }
    for note in draft.note.iter().chain(&shortened) {
        print_line(note);
    }
    if config.shard.recompute != draft.recompute.into() {
        config.shard.recompute = draft.recompute.into();
        settled.push(format!("shard.recompute = \"{}\"", draft.recompute));
    }
    if !settled.is_empty() {
        print_line(&format!("chosen for the device: {}", settled.join(", ")));
    }
    config.shard.accumulate = Some(draft.accumulate);
    let context_length = inherited.given_context;
    config.model = ModelSection { context_length, ..ModelSection::from_model(&model) };
    let config_text = toml::to_string(&config)
        .map_err(|error| TrainError::usage(format!("the configuration cannot be written: {error}")))?;
    if let Some(checkpoint) = &resume {
        print_line(&format!("resuming from {}", checkpoint.folder().display()));
        for difference in differences(checkpoint, &config) {
            print_line(&difference);
        }
        if !draft.changed.is_empty() {
            print_line(&format!(
                "reading the data at a different position, as allowed: {}",
                draft.changed.join(", ")
            ));
        }
    }
    let ranks = config.train.ranks;
    let place = options.place.as_ref();
    let sharing = place.map_or(ranks, device::ranks_sharing_cores);
    let threads = device::threads_per_rank(&config.device, sharing);
    let peak = match config.device.peak_tflops {
        Some(tflops) => Some(Peak::given(tflops * 1e12)),
        None => start
            .time("peak", || device.known_peak(config.precision.compute(), place, ranks, threads))
            .map_err(TrainError::threads("threads that measure the peak of this machine"))?,
    };
    let message = PlanMessage {
        config: config_text,
        data,
        out: SentPath::new(&found.named),
        resume: resume.as_ref().map(|checkpoint| SentPath::new(checkpoint.folder())),
        answers,
        peak,
        threads,
        runs: loss.runs(),
    };
    let base = base_of(&config, source.as_ref())?;
    let (out, claim, device) = (found.out, Some(claim), device.clone());
    Ok(Plan {
        message,
        config,
        model,
        tokenizer,
        out,
        resume,
        base,
        source,
        inherited,
        lock,
        claim,
        device,
        registry: options.registry.clone(),
        optimizer,
        loss,
        allow_missing: options.allow_missing.clone(),
        tools: None,
        stop: options.stop.clone(),
        start,
    })
}

/// Returns the model that the adapters of a run change, if it has adapters.
fn base_of(config: &Config, source: Option<&ModelSource>) -> Result<Option<BaseModel>> {
    let base = source.filter(|_| config.lora.adapters().is_some()).map(ModelSource::base_model);
    Ok(base.map(ModelSource::as_base).transpose()?)
}

/// Returns differences from the checkpoint's run in keys with device-dependent defaults and in the next learning rate.
fn differences(checkpoint: &Checkpoint, config: &Config) -> Vec<String> {
    let Ok(before) = config::load(&checkpoint.folder().join("config.toml"), &[]) else {
        return Vec::new();
    };
    let mut differences = Vec::new();
    let (was, is) = (accumulate_of(&before), config.shard.accumulate());
    if was != is {
        differences.push(format!("shard.accumulate was \"{was}\" and is \"{is}\" from here on"));
    }
    let (was, is) = (before.precision.compute(), config.precision.compute());
    if was != is {
        differences.push(format!("precision.compute was \"{was}\" and is \"{is}\" from here on"));
    }
    let (was, is) = (before.micro_batch(), config.micro_batch());
    if was != is {
        differences.push(format!("train.micro_batch was {was} and is {is} from here on"));
    }
    let (was, is) = (&before.loss.kind, &config.loss.kind);
    if was != is {
        differences.push(format!("loss.kind was \"{was}\" and is \"{is}\" from here on"));
    }
    for (name, is) in &config.loss.frozen {
        if let Some(was) = before.loss.frozen.get(name).filter(|was| *was != is) {
            let (was, is) = (was.display(), is.display());
            differences.push(format!("loss.frozen.{name} was {was} and is {is} from here on"));
        }
    }
    differences.extend(schedule::jump(checkpoint.state().step, &before, config));
    differences
}

/// Returns a checkpoint's `shard.accumulate`; builds without this key reduced gradients once per step.
fn accumulate_of(before: &Config) -> Accumulate {
    before.shard.accumulate.unwrap_or(Accumulate::Unsharded)
}

/// Returns the configured `shard.accumulate`, else the checkpoint's, for bitwise equal results, else the default.
fn settled_accumulate(shard: &ShardSection, resume: Option<&Checkpoint>) -> Accumulate {
    let before = resume.map(|checkpoint| {
        // An unreadable configuration comes from a build without this key.
        let before = config::load(&checkpoint.folder().join("config.toml"), &[]);
        before.map_or(Accumulate::Unsharded, |before| accumulate_of(&before))
    });
    shard.accumulate.or(before).unwrap_or_else(|| shard.accumulate())
}

/// Fails unless a micro-batch consists of whole groups of samples.
fn check_groups_of_samples(config: &Config, size: usize) -> Result<(), ConfigError> {
    let rows = config.micro_batch();
    match rows.is_multiple_of(size) {
        true => Ok(()),
        false => Err(ConfigError::invalid(format!(
            "train.micro_batch = {rows}: {size} samples of this data source belong together, so use a multiple of {size}"
        ))),
    }
}

struct Draft {
    found: Found,
    resume: Option<Checkpoint>,
    source: Option<ModelSource>,
    inherited: Inherited,
    data: DataInfo,
    tokenizer: Arc<[u8]>,
    answers: Vec<TokenPair>,
    model: ModelConfig,
    optimizer: Optimizer,
    loss: Loss,
    accumulate: Accumulate,
    recompute: Recompute,
    warnings: Vec<String>,
    note: Option<String>,
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
        let accumulate = settled_accumulate(&config.shard, resume.as_ref());
        let mut config = config.clone();
        config.shard.accumulate = Some(accumulate);
        let config = &config;
        let source = open_source(resume.as_ref(), config)?;
        let layers = options.registry.layers();
        let weights = source.as_ref().map(|source| source.model_of(layers));
        // Checked before long work on data: the smallest vocabulary decides, and suggestions assume the expected one.
        let known = |vocab_size| {
            let model = config.resolve_model(weights.as_ref(), Some(vocab_size));
            model.ok().filter(|model| model.validate().is_ok())
        };
        let place = options.place.as_ref();
        let pairs = prompts::read(config)?;
        let optimizer = options.registry.optimizers().make(&config.optim)?;
        options.registry.losses().find(&config.loss)?;
        let decoder = |model: &_| Decoder::new(layers, model, Key::new(0), &device::plain());
        let check = |model: &ModelConfig| -> Result<_> {
            let decoder = decoder(model)?;
            let mut config = config.clone();
            let recompute = memory::settle_recompute(&config, model, &decoder, &optimizer, device, place);
            config.shard.recompute = recompute.into();
            let warnings = memory::check(&config, model, &decoder, &optimizer, device, place)?;
            Ok((recompute, warnings))
        };
        if let Some(Err(least)) = known(1).map(|model| check(&model)) {
            let full = known(config.data.vocab_size).map(|model| check(&model));
            return Err(full.and_then(Result::err).unwrap_or(least));
        }
        let trained_on = resume.as_ref().and_then(|from| from.state().data_sha256.as_deref());
        let sources = options.registry.sources();
        let open = || prepared::open(config, sources, trained_on, &options.stop);
        let data = start.time("data", || process::in_pool(open));
        let data = data.map_err(TrainError::threads("threads that open or prepare the data"))??;
        let tokenizer = data::read_tokenizer_of(&config.data.path)?;
        let model = resolve_model(config, &data, source.as_ref(), &tokenizer, layers)?;
        let loss = options.registry.losses().make(&config.loss, model.vocab_size)?;
        check_frozen(&config.loss, &tokenizer, config.data.seq_len)?;
        let decoder = decoder(&model)?;
        let (recompute, mut warnings) = check(&model)?;
        check_parts(config, &decoder)?;
        if !Layers::default().missing(&model).is_empty() {
            try_first_block(layers, &model, config.data.seq_len)
                .map_err(|mistake| ConfigError::invalid(mistake.to_string()))?;
        }
        check_source(resume.as_ref(), source.as_ref(), &model, &optimizer, options)?;
        for split in [Split::Train, Split::Validation] {
            let samples = Samples::open(&config.data.path, split, config.data.seq_len, sources)?;
            samples.check()?;
            if let Samples::Chats(chats) = &samples
                && split == Split::Train
            {
                warnings.extend(chats.too_long());
            }
            check_groups_of_samples(config, samples.group_size())?;
        }
        let changed = match &resume {
            Some(checkpoint) => check_position(checkpoint, config, &data, &tokenizer, options)?,
            None => Vec::new(),
        };
        let tokenizer: Arc<[u8]> = tokenizer.into();
        let inherited = Inherited::of(source.as_ref(), config, &data, &tokenizer)?;
        warnings.extend(inherited.beyond_context(config));
        if let (Some(name), Loss::CrossEntropy | Loss::Token(_)) = (&model.head_layer, &loss) {
            warnings.push(format!(
                "loss.kind = \"{}\" does not train the extra head, model.head_layer = \"{name}\": only an objective runs \
                 it. Name the objective in loss.kind, or remove model.head_layer",
                config.loss.kind
            ));
        }
        let note = inherited.other_tokenizer.as_ref().filter(|_| resume.is_none()).map(|own| {
            format!(
                "the data in {} have a different tokenizer from the initial weights ({}): their token ids mean \
                 different text to the model, and checkpoints omit the chat template and end tokens of the \
                 weights' tokenizer",
                config.data.path.display(),
                own.display()
            )
        });
        let context = inherited.context_length;
        let answers = prompts::tokenize(config, &pairs, &tokenizer, data.end_of_text, context)?;
        Ok(Draft {
            found,
            resume,
            source,
            inherited,
            data,
            tokenizer,
            answers,
            model,
            optimizer,
            loss,
            accumulate,
            recompute,
            warnings,
            note,
            changed,
        })
    }
}

impl Plan {
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

    /// Returns the folder of the run's checkpoints.
    pub fn checkpoints(&self) -> PathBuf {
        checkpoint::checkpoints_folder(&self.out)
    }

    /// Returns a handle that shows whether the run folder still belongs to this run.
    pub fn held(&self) -> Option<HeldFolder> {
        self.lock.held()
    }

    /// Returns the key of all random numbers in the run.
    pub fn key(&self) -> Key {
        Key::new(self.config.train.seed)
    }
}

impl PlanMessage {
    pub(super) fn into_plan(self, options: &RunOptions, device: &ResolvedDevice) -> Result<Plan> {
        let unreadable = |problem: String| TrainError::Rank0 { message: problem, usage: false };
        let config: Config = toml::from_str(&self.config).map_err(|error| unreadable(error.to_string()))?;
        device.check_precision(config.precision.compute())?;
        // The model is complete in this configuration, so that every rank reads the same values.
        let model = config.resolve_model(None, None).map_err(unreadable)?;
        let tokenizer: Arc<[u8]> = data::read_tokenizer_of(&config.data.path)?.into();
        let out = folder::resolve(self.out.path());
        let lock = Lock::share(&out)?;
        let resume = self.resume.as_ref().map(|from| Checkpoint::open(from.path())).transpose()?;
        let source = open_source(resume.as_ref(), &config)?;
        let inherited = Inherited::of(source.as_ref(), &config, &self.data, &tokenizer)?;
        let (allow_missing, stop) = (options.allow_missing.clone(), options.stop.clone());
        let registry = options.registry.clone();
        let optimizer = registry.optimizers().make(&config.optim)?;
        let loss = registry.losses().make(&config.loss, model.vocab_size)?;
        if loss.runs() != self.runs {
            let (here, there) = (loss.runs(), self.runs);
            let kind = &config.loss.kind;
            return Err(unreadable(format!(
                "loss.kind = \"{kind}\" runs the model {here} times here and {there} times on rank 0: start the same \
                 program on all ranks"
            )));
        }
        let base = base_of(&config, source.as_ref())?;
        let (message, claim, device) = (self, None, device.clone());
        Ok(Plan {
            message,
            config,
            model,
            tokenizer,
            out,
            resume,
            base,
            source,
            inherited,
            lock,
            claim,
            device,
            registry,
            optimizer,
            loss,
            allow_missing,
            tools: None,
            stop,
            start: StartTimes::default(),
        })
    }
}
