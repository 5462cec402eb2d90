//! Training a decoder: on ranks that are threads of this process, or as one rank of several processes.

use std::error::Error;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use clap::Args;
use kiln_collectives::Communicator;
use kiln_observe::page;
use kiln_shard::ranks::{run_rank, run_ranks};

use super::events::Events;
use super::options::{PositionKey, Resume, RunFolder, RunOptions, Summary};
use super::plan::Plan;
use super::smoke::{self, Smoke};
use super::startup::StartTimes;
use super::trainer::Trainer;
use super::{agree, exhausted, joining, plan, surroundings};
use crate::config::{self, Backend, Config};
use crate::debug::{About, Breakpoint, DebugOptions, HashOptions, Others, Server, TraceOptions};
use crate::device::{self, ResolvedDevice};
use crate::error::{Result, TrainError};
use crate::fault::{self, Fault};
use crate::flight::FlightGuard;
use crate::kernels;
use crate::launch;
use crate::metrics::say;
use crate::place::{self, Job, RankEnv, Role};
use crate::process::{output, stop_on_signals};
use crate::registry::Registry;
use crate::watch;
use crate::weights::AllowMissing;
use crate::world::{self, World};

/// Arguments of `kiln train`.
#[derive(Args)]
pub(crate) struct TrainArgs {
    /// Configuration file; configs/ has some to start from.
    config: PathBuf,
    /// Ranks, as threads of this process [default: train.ranks of the configuration].
    #[arg(long)]
    ranks: Option<usize>,
    /// Run folder [default: runs/<name of the configuration>].
    #[arg(long)]
    out: Option<PathBuf>,
    /// Change one value of the configuration; may be given several times.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    overrides: Vec<String>,
    /// Go on from the newest checkpoint of the run folder ("latest"), or from a checkpoint folder.
    #[arg(long, value_name = "latest|PATH")]
    resume: Option<String>,
    /// Weights that the checkpoint to start from may lack, as in "lm_head.*"; they keep their
    /// initial values. May be given several times.
    #[arg(long, value_name = "PATTERN")]
    allow_missing: Vec<String>,
    /// Take the weights of the checkpoint to start from by name and shape, also if it was trained
    /// with other parts than this program builds.
    #[arg(long)]
    allow_other_parts: bool,
    /// Go on from the checkpoint though this differs from what it was trained with, which means another
    /// position in the data. May be given several times.
    #[arg(long, value_name = "KEY", value_enum)]
    allow_changed: Vec<PositionKey>,
    /// Try everything that the run does, shrunk to about a minute: train, evaluate, save, go on, sample.
    /// `--smoke=width` shrinks the model too.
    #[arg(
        long,
        value_name = "WHAT",
        value_enum,
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "batch",
        conflicts_with_all = ["resume", "allow_missing", "allow_changed"]
    )]
    smoke: Option<Smoke>,
    /// Hold the run there for somebody to look into it, as in forward:layers.3@12 or "grad_norm > 10". May be
    /// given several times.
    #[arg(long = "break", value_name = "WHERE")]
    breakpoints: Vec<Breakpoint>,
    /// What the other ranks do when --break holds one, --rank.
    #[arg(long, value_name = "WHAT", value_enum, default_value = "hold", requires = "breakpoints")]
    others: Others,
    /// Write hashes of the tensors of these steps to `<out>/hashes.jsonl`, for `kiln diff`: steps=1-20, or
    /// steps=5,activations,gradients,weights,moments; with `units`, one per module and kind.
    #[arg(long, value_name = "STEPS[,KINDS]")]
    hash: Option<HashOptions>,
    /// Write what every rank does in these steps to a file for Perfetto, for `kiln trace summary` as well:
    /// `<out>/traces/steps-10-12.pftrace`, or FILE.
    #[arg(long, value_name = "steps=10-12[,FILE]")]
    trace: Option<TraceOptions>,
    /// Record every allocation of a step, draw who held how much when, and name what makes the peak:
    /// `<out>/memory`. The third step, or STEP.
    #[arg(
        long,
        value_name = "STEP",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "3",
        value_parser = clap::value_parser!(u64).range(1..)
    )]
    memory_profile: Option<u64>,
    #[command(flatten)]
    place: place::Flags,
    /// Fire drill: let one rank fail, once.
    #[arg(long, value_name = "KIND@PHASE:STEP:RANK", hide = true)]
    fault: Option<Fault>,
}

/// The error for a smoke run under a launcher.
const SMOKE_ALONE: &str =
    "--smoke starts its ranks itself, as threads: leave out `kiln launch`, and give --ranks N";

impl TrainArgs {
    /// Trains, or starts the ranks of a node; returns the exit code.
    pub(crate) fn run(mut self, program: Program) -> Result<u8> {
        let debug = self.debug_options()?;
        let (place, job) = match place::find_here(&self.place)? {
            Role::Node(node) => return Ok(launch::run_node(node)?),
            Role::Rank(place) => (Some(place), Job::default()),
            Role::Alone(job) => (None, job),
        };
        let config = config::load(&self.config, &self.overrides)?;
        let options = RunOptions {
            out: self.out.map_or_else(|| RunFolder::of_config(&self.config), RunFolder::At),
            resume: self.resume.map(|resume| match resume.as_str() {
                "latest" => Resume::Latest,
                path => Resume::Path(path.into()),
            }),
            ranks: self.ranks,
            registry: program.registry.clone(),
            place,
            job,
            stop: stop_on_signals(),
            allow_missing: AllowMissing::new(&self.allow_missing).map_err(TrainError::usage)?,
            allow_other_parts: self.allow_other_parts,
            allow_changed: self.allow_changed,
            debug,
            fault: self.fault,
            // The environment was read above, and flags override it.
            alone: true,
        };
        let train = |config, options: &RunOptions| train_with(config, options, &*program.training_loop);
        let summary = match self.smoke {
            None => train(config, &options)?,
            Some(_) if options.place.is_some() => return Err(TrainError::usage(SMOKE_ALONE)),
            Some(shrink) => {
                // Users who name a folder want to look at it afterwards.
                let (named, temporary) = match &options.out {
                    RunFolder::At(folder) => (folder.clone(), None),
                    RunFolder::Next(_) => {
                        let folder = tempfile::Builder::new().prefix("kiln-smoke-").tempdir();
                        let folder =
                            folder.map_err(TrainError::io("make a folder in", &std::env::temp_dir()))?;
                        (folder.path().to_owned(), Some(folder))
                    }
                };
                let summary = smoke::run(config, shrink, &named, options, train);
                drop(temporary);
                summary?
            }
        };
        Ok(if summary.preempted { launch::PREEMPTED } else { 0 })
    }
}

impl TrainArgs {
    /// Builds the debugging options. With a breakpoint and without a world size, `--rank` is the rank to hold
    /// instead of the rank of this process.
    fn debug_options(&mut self) -> Result<DebugOptions> {
        let mut breakpoints = std::mem::take(&mut self.breakpoints);
        if !breakpoints.is_empty() && self.place.world_size.is_none() {
            let rank = self.place.rank.take().map(|rank| rank.parse::<usize>()).transpose();
            let rank = rank.map_err(|error| TrainError::usage(format!("--rank: {error}")))?;
            for breakpoint in &mut breakpoints {
                if let (Some(rank), None) = (rank, breakpoint.rank) {
                    (breakpoint.rank, breakpoint.others) = (Some(rank), self.others);
                }
            }
        }
        Ok(DebugOptions {
            breakpoints,
            has_prompt: true,
            hash: self.hash.take(),
            trace: self.trace.take(),
            memory_profile: self.memory_profile,
        })
    }
}

/// The result of a training loop: a summary, as from [`Trainer::finish`], or an error of any type.
pub type LoopResult = std::result::Result<Summary, Box<dyn Error + Send + Sync>>;

/// The parts that a program adds to Kiln, and its training loop; [`cli::main`](crate::cli::main) takes it. A
/// [`Registry`] alone uses the stock loop, [`Trainer::run`].
#[derive(Clone)]
pub struct Program {
    pub(crate) registry: Registry,
    pub(crate) training_loop: Arc<dyn Fn(Trainer<'_>) -> LoopResult + Send + Sync>,
}

impl From<Registry> for Program {
    fn from(registry: Registry) -> Self {
        registry.training_loop(stock_loop)
    }
}

fn stock_loop(trainer: Trainer<'_>) -> LoopResult {
    Ok(trainer.run()?)
}

impl Registry {
    /// Returns a program with these parts and a custom training loop, which decides when the run evaluates,
    /// saves and ends. Every rank runs the loop, and all ranks must decide alike: see [`Trainer`].
    ///
    /// ```no_run
    /// use kiln::registry::Registry;
    /// use kiln::run::{LoopResult, Trainer};
    ///
    /// fn my_loop(mut trainer: Trainer<'_>) -> LoopResult {
    ///     while trainer.train_step()? {
    ///         // Every rank comes here after every step.
    ///     }
    ///     Ok(trainer.finish()?)
    /// }
    ///
    /// fn main() -> std::process::ExitCode {
    ///     kiln::cli::main(Registry::default().training_loop(my_loop))
    /// }
    /// ```
    pub fn training_loop(self, run: impl Fn(Trainer<'_>) -> LoopResult + Send + Sync + 'static) -> Program {
        Program { registry: self, training_loop: Arc::new(run) }
    }
}

/// Trains the decoder that `config` describes, built from the layers in `options.registry`.
///
/// # Errors
///
/// If something is missing or wrong before the first step, a step or a save fails, or the ranks lose each
/// other.
pub fn train(config: Config, options: &RunOptions) -> Result<Summary> {
    train_with(config, options, stock_loop)
}

/// Like [`train`], with a custom training loop that every rank runs.
///
/// # Errors
///
/// As for [`train`], and the errors of `run`.
pub fn train_with(
    config: Config,
    options: &RunOptions,
    run: impl Fn(Trainer<'_>) -> LoopResult + Send + Sync,
) -> Result<Summary> {
    let mut start = StartTimes::default();
    let _output = output::never_block();
    surroundings::check(options)?;
    let config = with_ranks(config, options)?;
    let device = ResolvedDevice::new(&config, options.registry.layers(), options.place.as_ref())?;
    match &options.place {
        None => run_as_threads(config, options, &device, start, &run),
        Some(place) => {
            let out = super::folder::likely_place(&config, options);
            let join = || joining::join(place, &config.comm, &options.stop, out.as_deref());
            let world = start.time("join", join)?;
            run_as_process(&world, config, options, &device, place, start, &run)
        }
    }
}

/// Like [`train`], as rank `options.place` of a world that is already connected; `world` is that rank's
/// communicator. Runs on the CPU, whose memory every backend can transfer.
///
/// # Errors
///
/// As for [`train`], and if the configuration insists on a GPU. Other ranks receive this rank's error.
pub fn train_joined(world: Arc<dyn Communicator>, config: Config, options: &RunOptions) -> Result<Summary> {
    let _output = output::never_block();
    let config = with_ranks(config, options)?;
    match &options.place {
        None => Err(TrainError::usage("a world was given, but no place in it")),
        Some(place) => {
            let (device, world) = (ResolvedDevice::for_joined(&config)?, World::given(world));
            run_as_process(&world, config, options, &device, place, StartTimes::default(), &stock_loop)
        }
    }
}

/// Runs all ranks as threads of this process.
fn run_as_threads(
    config: Config,
    options: &RunOptions,
    device: &ResolvedDevice,
    start: StartTimes,
    run: &(impl Fn(Trainer<'_>) -> LoopResult + Sync),
) -> Result<Summary> {
    device.warn_of_idle_gpus();
    let (ranks, steps) = (config.train.ranks, config.train.steps);
    options.debug.check(ranks, steps, false, device.is_gpu()).map_err(TrainError::usage)?;
    let mut plan = plan::make(&config, options, device, start)?;
    check_kernels(&mut plan, device, None)?;
    exhausted::limit(&plan, None);
    let _server = look_into(&plan, (0..plan.config.train.ranks).collect());
    let summaries = run_ranks(plan.config.train.ranks, plan.message.threads, |world| {
        let (world, drill) = fault::rehearse(world, options.fault.as_ref(), options.job().restarts);
        let flight = FlightGuard::new(&plan.out, plan.held(), world.clone());
        let outcome = flight.watch(|| run(Trainer::start(&plan, world, drill)?).map_err(TrainError::of_loop));
        outcome.map_err(|error| error.with_flights(&plan.out))
    });
    let mut summaries = summaries.map_err(TrainError::from).inspect_err(|error| {
        plan.claim.iter().for_each(|claim| claim.events().fail(error));
    })?;
    Ok(summaries.swap_remove(0))
}

/// Runs this process as one rank of `world`. Rank 0 makes the plan.
fn run_as_process(
    met: &World,
    config: Config,
    options: &RunOptions,
    device: &ResolvedDevice,
    place: &RankEnv,
    start: StartTimes,
    run: &(impl Fn(Trainer<'_>) -> LoopResult + Sync),
) -> Result<Summary> {
    let threads = device::threads_per_rank(&config.device, device::ranks_sharing_cores(place));
    let events = OnceLock::<Arc<Events>>::new();
    let summary = run_rank(met.communicator(), threads, |world| {
        let (world, drill) = fault::rehearse(world, options.fault.as_ref(), place.job.restarts);
        let config = with_groups(config.clone(), &*world)?;
        agree::on_config(&*world, &config, options)?;
        let with_mpi = !world.shares_holds();
        let (ranks, steps) = (world.world_size(), config.train.steps);
        options.debug.check(ranks, steps, with_mpi, device.is_gpu()).map_err(TrainError::usage)?;
        if config.device.backend != Backend::Cpu {
            met.settle_on(device, &config.comm)?;
        }
        let make = || plan::make(&config, options, device, start.clone());
        let mut plan = agree::on_plan(&*world, &config, options, device, make)?;
        plan.claim.iter().for_each(|claim| drop(events.set(claim.events().clone())));
        check_kernels(&mut plan, device, Some(&*world))?;
        exhausted::limit(&plan, Some(place));
        let _server = look_into(&plan, vec![place.rank]);
        let flight = FlightGuard::new(&plan.out, plan.held(), world.clone());
        let outcome = flight.watch(|| run(Trainer::start(&plan, world, drill)?).map_err(TrainError::of_loop));
        outcome.map_err(|error| error.with_flights(&plan.out))
    });
    summary.map_err(TrainError::from).inspect_err(|error| {
        met.give_up();
        events.get().into_iter().for_each(|events| events.fail(error));
    })
}

/// Runs [`kernels::settle`] and counts its time as part of the start.
fn check_kernels(plan: &mut Plan, device: &ResolvedDevice, world: Option<&dyn Communicator>) -> Result<()> {
    let begun = Instant::now();
    kernels::settle(&plan.config, &plan.model, device, world)?;
    plan.start.add("check of kernels", begun.elapsed());
    Ok(())
}

/// Starts the servers that let users inspect `ranks`, the ranks of this process, and the whole run if rank 0 is
/// one of them.
fn look_into(plan: &Plan, ranks: Vec<usize>) -> (Server, Option<page::Server>) {
    let Config { train, comm, .. } = &plan.config;
    let (world_size, steps) = (train.ranks, train.steps);
    let about = About {
        world_size,
        steps,
        deadline: comm.timeout(),
        on_gpu: plan.device.is_gpu(),
        desk: plan.desk.clone(),
    };
    let address = plan.config.log.http.filter(|_| ranks.contains(&0));
    let server = Server::start(&plan.out, ranks, about);
    // A run continues without its page.
    let page = address.and_then(|address| match watch::serve(address, vec![plan.out.clone()], false) {
        Ok(page) => {
            say(&format!("this run is at {}", page.url()));
            Some(page)
        }
        Err(error) => {
            tracing::warn!("log.http: {error}; the run goes on without it");
            None
        }
    });
    (server, page)
}

/// Returns `config` with the actual number of ranks, validated.
pub(crate) fn with_ranks(mut config: Config, options: &RunOptions) -> Result<Config> {
    config.train.ranks = world::ranks_of(&config, options.place.as_ref(), options.ranks)?;
    if options.place.is_none() {
        config.validate_threads()?;
        return Ok(config);
    }
    let mut checked = config.clone();
    if config.shard.strategy.is_hybrid() {
        // The size is known once the machines of all ranks are; see `with_groups`.
        checked.shard.shard_size.get_or_insert(config.train.ranks);
    }
    checked.validate()?;
    Ok(config)
}

/// Returns `config` with one shard group per machine if its strategy has groups and it sets no group size.
fn with_groups(mut config: Config, world: &dyn Communicator) -> Result<Config> {
    let shard = &mut config.shard;
    shard.shard_size = world::shard_size(shard.strategy, shard.shard_size, world)?;
    Ok(config)
}
