//! `kiln warmup`: compiles the kernels of a run before it starts, and carries compiled kernels to other machines.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use burn::tensor::{DType, Device, FloatDType, Tensor};
use clap::Args;
use kiln_collectives::Communicator;
#[cfg(feature = "cuda")]
use kiln_model::ops::cube::matmul::{ProductAlgorithms, measure_algorithms, measured_algorithms};
use kiln_model::{Context, Decoder, Key, KeyValueCache, ModelConfig, decoder};
use kiln_shard::EngineBuilder;

use crate::bench::prepare;
use crate::smoke::forget_absent;
use kiln_checkpoint::sharded::ShardedDecoder;
use kiln_config::device::{self, KernelCounts, ResolvedDevice};
use kiln_config::{self as config, Config, ModelSection};
use kiln_data::{self as data, DataInfo, Tokenizer};
use kiln_launch::place::{self, Role};
#[cfg(feature = "cuda")]
use kiln_sys::words::number_of;
use kiln_train::error::{Result, TrainError};
use kiln_train::kernels;
use kiln_train::launch;
#[cfg(feature = "cuda")]
use kiln_train::named;
use kiln_train::passes::{MicroBatch, RunLoss, forward_backward, micro_batches, tokens_of_step};
use kiln_train::process::output::{ProgressLine, print_line};
use kiln_train::registry::Registry;
use kiln_train::world::{self, Ranks};

/// Arguments of `kiln warmup`.
#[derive(Args)]
pub struct WarmupArgs {
    /// Configuration file of the run whose kernels are compiled.
    #[arg(required_unless_present_any = ["pack", "unpack"])]
    config: Option<PathBuf>,
    /// Number of ranks, as threads of this process [default: train.ranks]; not needed under a launcher, which starts
    /// them as processes.
    #[arg(long)]
    ranks: Option<usize>,
    /// Override a configuration value; may be repeated.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    overrides: Vec<String>,
    /// Also measure the algorithms that cuBLASLt offers for each matrix product, and keep the fastest for later
    /// runs on such GPUs. Other algorithms round differently.
    #[arg(long, requires = "config")]
    products: bool,
    /// Write all compiled kernels of this user to FILE, a tar archive, with the algorithms of --products.
    #[arg(long, value_name = "FILE")]
    pack: Option<PathBuf>,
    /// First import the compiled kernels in FILE, which --pack has written on this machine or another.
    #[arg(long, value_name = "FILE")]
    unpack: Option<PathBuf>,
}

/// Maximum number of elements that burn's kernels load at once from a row of f32.
const VECTOR: usize = 4;

/// Number of optimizer steps: only the second one starts from existing moments.
const STEPS: u64 = 2;

const STAGES: u64 = STEPS + 2;

impl WarmupArgs {
    /// Compiles as one rank, or launches the ranks of this node. Returns the exit code.
    pub fn run(self, registry: &Registry) -> Result<u8> {
        let place = match place::find_here(&place::Flags::default())? {
            Role::Node(node) => return Ok(launch::run_node(node)?),
            Role::Rank(place) => Some(place),
            Role::Alone(_) => None,
        };
        let is_first = place.as_ref().is_none_or(|place| place.local_rank == 0);
        if let Some(archive) = self.unpack.as_ref().filter(|_| is_first) {
            unpack(archive)?;
        }
        if let Some(path) = &self.config {
            let asked = with_vocabulary(config::load(path, &self.overrides)?)?;
            let (config, model, selected) = prepare(asked, self.ranks, registry, place.as_ref())?;
            let before = selected.kernels().ok_or_else(|| {
                TrainError::usage(format!(
                    "only kernels for NVIDIA GPUs can be compiled and kept, but this configuration computes on another \
                     device: {}",
                    selected.name()
                ))
            })?;
            let measurement = self.products.then(Measurement::start).transpose()?;
            let identity = format!("{} warmup {config:?}", env!("CARGO_PKG_VERSION"));
            let ranks = Ranks::meet(&config, place.as_ref(), &identity, &selected)?;
            let run = ShortRun::new(config, model, registry, &selected)?;
            let measured = ranks.run(&run.config, |world| {
                run.warm_up(world.clone(), before)?;
                let gather =
                    |measurement: &Measurement| measurement.gather(&*world, run.config.comm.timeout());
                measurement.as_ref().map(gather).transpose()
            })?;
            if let Some((measurement, measured)) = measurement.zip(measured).filter(|_| is_first) {
                measurement.keep(measured)?;
            }
        }
        if let Some(archive) = self.pack.as_ref().filter(|_| is_first) {
            pack(archive)?;
        }
        Ok(0)
    }
}

struct ShortRun<'a> {
    config: Config,
    model: ModelConfig,
    registry: &'a Registry,
    selected: &'a ResolvedDevice,
}

impl<'a> ShortRun<'a> {
    fn new(
        mut config: Config,
        mut model: ModelConfig,
        registry: &'a Registry,
        selected: &'a ResolvedDevice,
    ) -> Result<Self> {
        // Kernels depend on layer sizes, not on the number of layers, and layers of one kind have the same sizes.
        let windows: Vec<_> = (0..model.layers).map(|layer| model.window_of(layer)).collect();
        let last_new = (0..windows.len()).rev().find(|&layer| !windows[..layer].contains(&windows[layer]));
        model.layers = model.layers.min(last_new.map_or(1, |layer| layer + 1).max(2));
        config.model = ModelSection::from_model(&model);
        // Two micro-batches if the run has several: the second one adds to the gradient of the first.
        let of_rank = config.train.ranks * config.micro_batch();
        config.train.global_batch = of_rank * (config.train.global_batch / of_rank).clamp(1, 2);
        let decoder = Decoder::new(registry.layers(), &model, Key::new(0), &device::plain())?;
        forget_absent(&mut config, &decoder);
        Ok(ShortRun { config, model, registry, selected })
    }

    /// Compiles all kernels by running them on one rank; `before` counts this process's earlier kernels. Collective.
    fn warm_up(&self, world: Arc<dyn Communicator>, before: KernelCounts) -> Result<()> {
        let ShortRun { config, model, registry, selected } = self;
        let (device, rank) = (selected.device(), world.rank());
        let line = (rank == 0).then(|| ProgressLine::start("compiling kernels", "the check of kernels"));
        let stage = |what: &str, done: u64| {
            let counts = selected.kernels().unwrap_or_default() - before;
            line.iter().for_each(|line| line.set(format!("{what}; {counts}"), done, STAGES));
        };
        kernels::settle_on_rank(config, model, selected, &*world)?;
        let optimizer = registry.optimizers().make(&config.optim)?;
        let shard_size = world::shard_size(config.shard.strategy, config.shard.shard_size, &*world)?;
        let loss = registry.losses().make(&config.loss, model.vocab_size)?;
        let loss = RunLoss::load(loss, registry.layers(), config, &world, &device)?;
        let builder = EngineBuilder::new(world, config.policy(), shard_size)?
            .optimizer(optimizer)
            .freeze(config.frozen());
        let decoder = Decoder::new(registry.layers(), model, Key::new(config.train.seed), &device)?;
        let sharded = ShardedDecoder::new(decoder, builder)?;
        let tokens = self.tokens()?;
        for step in 0..STEPS {
            stage("training", step);
            tokens.train(&sharded, &loss, &device, config)?;
        }
        stage("evaluation", STEPS);
        tokens.evaluate(&sharded, &device, config)?;
        stage("sampling", STEPS + 1);
        generate(&sharded, &device, config, model)?;
        device.sync().map_err(|error| TrainError::Crash(format!("the device has failed: {error}")))?;
        drop(line);
        if rank == 0 {
            print_line(&format!("warm: {}", selected.kernels().unwrap_or_default() - before));
        }
        Ok(())
    }

    fn tokens(&self) -> Result<Zeros> {
        let Config { train, data, .. } = &self.config;
        let context = Context::training(Key::new(0), 0, self.model.dropout)
            .with_z_loss((train.z_loss > 0.0).then_some(train.z_loss));
        Ok(Zeros { context, count: self.config.micro_batch() * data.seq_len })
    }
}

/// Micro-batches that repeat one token: kernels do not depend on the values.
struct Zeros {
    context: Context,
    count: usize,
}

impl Zeros {
    fn train(&self, model: &ShardedDecoder, loss: &RunLoss, device: &Device, config: &Config) -> Result<()> {
        let engine = model.engine();
        let micro_batches = micro_batches(config, engine.world().world_size());
        engine.begin_step();
        for index in 0..micro_batches {
            let (ids, context) = (vec![0; self.count], self.context.clone());
            let batch = MicroBatch { inputs: ids.clone(), targets: ids, weights: None, context };
            let (counted, last) = (tokens_of_step(config), index + 1 == micro_batches);
            forward_backward(model, loss, config, device, batch, counted, last)?;
        }
        let update = engine.update(config.optim.lr, config.optim.grad_clip)?;
        engine.outcome(update)?;
        Ok(())
    }

    fn evaluate(&self, model: &ShardedDecoder, device: &Device, config: &Config) -> Result<()> {
        let (rows, seq_len) = (config.micro_batch(), config.data.seq_len);
        let tokens = || device::tokens(vec![0; self.count], rows, seq_len, device);
        let loss = decoder::loss(&model.pass(device), tokens(), tokens(), 1.0, &Context::evaluation());
        model.engine().check()?;
        loss.into_scalar::<f32>();
        Ok(model.engine().finish_evaluation()?)
    }
}

fn generate(sharded: &ShardedDecoder, device: &Device, config: &Config, model: &ModelConfig) -> Result<()> {
    if config.sample.all_prompts().next().is_none() {
        return Ok(());
    }
    copy_a_cache(device, config, model);
    let pass = sharded.pass(device);
    // A kernel's load width depends on whether lengths are multiples of two and of four.
    for prompt in 1..=VECTOR.min(config.data.seq_len) {
        let room = prompt.saturating_add(config.sample.max_tokens).min(config.data.seq_len);
        let cache = KeyValueCache::new(room);
        let further = VECTOR.min(room - prompt);
        for count in std::iter::once(prompt).chain(std::iter::repeat_n(1, further)) {
            let tokens = device::tokens(vec![0; count], 1, count, device);
            let Ok(logits) = decoder::next_logits(&pass, tokens, &cache) else {
                unreachable!("invariant: the cache has room for the prompt and these tokens")
            };
            sharded.engine().finish_evaluation()?;
            logits.into_data();
        }
    }
    Ok(())
}

/// Compiles the kernel that copies a key-value cache: depending on timing, burn copies a cache before its first write.
fn copy_a_cache(device: &Device, config: &Config, model: &ModelConfig) {
    let dtype: DType = FloatDType::from(config.precision.compute()).into();
    let zeros = |rows| {
        let shape = [1, rows, model.kv_heads, model.head_dim()];
        Tensor::<4>::zeros(shape, (device, dtype))
    };
    let cache = zeros(config.data.seq_len);
    let _held = cache.clone();
    cache.slice_assign([0..1, 0..1, 0..model.kv_heads, 0..model.head_dim()], zeros(1));
}

/// Sets the vocabulary size of prepared data, on which kernels depend.
fn with_vocabulary(mut config: Config) -> Result<Config> {
    let path = &config.data.path;
    let Ok(file) = data::tokenizer_of(path) else {
        print_line(&format!(
            "no data in {}: using a vocabulary of data.vocab_size = {} tokens",
            path.display(),
            config.data.vocab_size
        ));
        return Ok(config);
    };
    let info = DataInfo::load(path)?;
    let tokenizer = Tokenizer::from_file(data::read_tokenizer_of(path)?, &file)?;
    config.data.vocab_size = info.vocab_size.max(tokenizer.vocab_size());
    Ok(config)
}

#[cfg(feature = "cuda")]
struct Measurement {
    folder: PathBuf,
}

#[cfg(feature = "cuda")]
impl Measurement {
    /// Measures the algorithms for each new kind of product from now on. Fails if their folder is unusable.
    fn start() -> Result<Measurement> {
        let unknown = |error| TrainError::usage(format!("measured algorithms cannot be kept: {error}"));
        let folder = device::products_folder().map_err(unknown)?;
        device::check_products(&folder).map_err(TrainError::io("read", &folder))?;
        measure_algorithms();
        Ok(Measurement { folder })
    }

    /// Collects all ranks' measurements; the lowest rank's choice counts, so that all machines agree. Collective.
    fn gather(&self, world: &dyn Communicator, timeout: Duration) -> Result<ProductAlgorithms> {
        let failed = |error: serde_json::Error| {
            TrainError::Crash(format!("the ranks' measurements cannot be combined: {error}"))
        };
        let mine = serde_json::to_vec(&measured_algorithms()).map_err(failed)?;
        let mut all = ProductAlgorithms::default();
        for of_rank in world::gather(world, "measured products", &mine, timeout)?.iter().rev() {
            all = all.with(serde_json::from_slice(of_rank).map_err(failed)?);
        }
        Ok(all)
    }

    fn keep(&self, measured: ProductAlgorithms) -> Result<()> {
        let (products, gains) = (number_of(measured.len(), "matrix product"), measured.gains());
        let folder = &self.folder;
        device::keep_products(folder, measured)
            .map_err(TrainError::io("keep measured algorithms in", folder))?;
        let gained = match (gains.get(gains.len() / 2), gains.last()) {
            (Some(median), Some(most)) => format!(
                "{} faster than cuBLASLt's first choice, by a median factor of {median:.2} and at most \
                 {most:.2}",
                gains.len()
            ),
            _ => "cuBLASLt's first choice is the fastest for all".to_owned(),
        };
        print_line(&format!("measured {products}: {gained}; kept in {}", folder.display()));
        Ok(())
    }
}

/// Placeholder for builds without CUDA, which cannot be constructed.
#[cfg(not(feature = "cuda"))]
enum Measurement {}

#[cfg(not(feature = "cuda"))]
impl Measurement {
    fn start() -> Result<Measurement> {
        Err(kiln_config::device::DeviceError::NotBuilt.into())
    }

    fn gather(&self, _: &dyn Communicator, _: Duration) -> Result<()> {
        match *self {}
    }

    fn keep(&self, (): ()) -> Result<()> {
        match *self {}
    }
}

#[cfg(feature = "cuda")]
fn pack(archive: &Path) -> Result<()> {
    named::check(archive)?;
    let kernels = device::pack(archive).map_err(named::refused("pack the compiled kernels into", archive))?;
    print_line(&format!("packed {} into {}", number_of(kernels, "kernel"), archive.display()));
    Ok(())
}

#[cfg(feature = "cuda")]
fn unpack(archive: &Path) -> Result<()> {
    let unpacked = device::unpack(archive);
    let device::Unpacked { kernels, new, products } =
        unpacked.map_err(TrainError::io("unpack the compiled kernels of", archive))?;
    let kernels = number_of(kernels, "kernel");
    print_line(&format!("unpacked {kernels}, {new} of them new, from {}", archive.display()));
    if products > 0 {
        print_line(&format!("it also contains algorithms for {}", number_of(products, "matrix product")));
    }
    Ok(())
}

#[cfg(not(feature = "cuda"))]
fn pack(_: &Path) -> Result<()> {
    Err(device::DeviceError::NotBuilt.into())
}

#[cfg(not(feature = "cuda"))]
fn unpack(_: &Path) -> Result<()> {
    Err(device::DeviceError::NotBuilt.into())
}
