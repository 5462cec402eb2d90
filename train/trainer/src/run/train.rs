//! Training a decoder: on ranks that are threads of this process, or as one rank of several processes.

use std::error::Error;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use kiln_collectives::Communicator;
use kiln_shard::ranks::{self, run_ranks};

use super::events::Events;
use super::observe::{RunFacts, Tools};
use super::options::{RunOptions, Summary, check_surroundings};
use super::plan::Plan;
use super::startup::StartTimes;
use super::trainer::Trainer;
use super::{agree, joining, memory, plan};
use crate::error::{Result, TrainError};
use crate::fault::{self, Drill};
use crate::flight::FlightGuard;
use crate::kernels;
use crate::process::output;
use crate::registry::Registry;
use crate::world::{self, World};
use kiln_config::device::{self, ResolvedDevice};
use kiln_config::{Backend, Config};
use kiln_launch::place::RankEnv;

/// The result of a training loop: a summary, as from [`Trainer::finish`], or an error of any type.
pub type LoopResult = std::result::Result<Summary, Box<dyn Error + Send + Sync>>;

/// Custom parts and a training loop for `cli::main`. A [`Registry`] alone uses the loop [`Trainer::run`].
#[derive(Clone)]
pub struct Program {
    pub registry: Registry,
    pub training_loop: Arc<dyn Fn(Trainer<'_>) -> LoopResult + Send + Sync>,
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
    /// Returns a program with a custom training loop, in which all ranks must decide alike: see [`Trainer`].
    ///
    /// ```
    /// use kiln_train::registry::Registry;
    /// use kiln_train::run::{LoopResult, Trainer};
    ///
    /// fn my_loop(mut trainer: Trainer<'_>) -> LoopResult {
    ///     while trainer.train_step()? {
    ///         // Every rank comes here after every step.
    ///     }
    ///     Ok(trainer.finish()?)
    /// }
    ///
    /// let program = Registry::default().training_loop(my_loop);
    /// ```
    pub fn training_loop(self, run: impl Fn(Trainer<'_>) -> LoopResult + Send + Sync + 'static) -> Program {
        Program { registry: self, training_loop: Arc::new(run) }
    }
}

/// Trains the decoder that `config` describes, built from the layers in `options.registry`.
///
/// # Errors
///
/// If something is missing or wrong before the first step, a step or a save fails, or the ranks lose contact.
pub fn train(config: Config, options: &RunOptions) -> Result<Summary> {
    train_with(config, options, stock_loop)
}

/// Like [`train`], with a custom training loop that every rank runs. An error of the loop ends the run.
pub fn train_with(
    config: Config,
    options: &RunOptions,
    run: impl Fn(Trainer<'_>) -> LoopResult + Send + Sync,
) -> Result<Summary> {
    let mut start = StartTimes::default();
    let _output = output::never_block();
    check_surroundings(options)?;
    let config = with_ranks(config, options)?;
    let device = ResolvedDevice::new(&config, options.registry.layers(), options.place.as_ref())?;
    if let Some(place) = &options.place {
        let out = super::folder::likely_place(&config, options);
        let join = || joining::join(place, &config.comm, &options.stop, out.as_deref());
        let world = start.time("join", join)?;
        return run_process(&world, config, options, &device, place, start, &run);
    }
    device.warn_of_idle_gpus();
    let ranks = config.train.ranks;
    check_tools(options, &config, ranks, false, device.is_gpu())?;
    let mut plan = plan::make(&config, options, &device, start)?;
    prepare_process(&mut plan, options, &device, None, &(0..ranks).collect::<Vec<_>>())?;
    let summaries = run_ranks(ranks, plan.message.threads, |world| {
        let (world, drill) = fault::rehearse(world, options.fault.as_ref(), options.job().restarts);
        run_rank(&plan, world, drill, &run)
    });
    let mut summaries = summaries.map_err(TrainError::from).inspect_err(|error| {
        plan.claim.iter().for_each(|claim| claim.events().fail(error));
    })?;
    Ok(summaries.swap_remove(0))
}

/// Like [`train`], but on the CPU, as rank `options.place` of a world that `world` already connects.
///
/// # Errors
///
/// As for [`train`], and if the configuration requires a GPU. Other ranks receive this rank's error.
pub fn train_joined(world: Arc<dyn Communicator>, config: Config, options: &RunOptions) -> Result<Summary> {
    let _output = output::never_block();
    let config = with_ranks(config, options)?;
    match &options.place {
        None => Err(TrainError::usage("train_joined needs RunOptions::place, this rank's place")),
        Some(place) => {
            let (device, world) = (ResolvedDevice::for_joined(&config)?, World::given(world));
            run_process(&world, config, options, &device, place, StartTimes::default(), &stock_loop)
        }
    }
}

fn run_process(
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
    let summary = ranks::run_rank(met.communicator(), threads, |world| {
        let (world, drill) = fault::rehearse(world, options.fault.as_ref(), place.job.restarts);
        let config = with_groups(config.clone(), &*world)?;
        agree::on_config(&*world, &config, options)?;
        let with_mpi = !world.shares_holds();
        check_tools(options, &config, world.world_size(), with_mpi, device.is_gpu())?;
        if config.device.backend != Backend::Cpu {
            met.settle_on(device, &config.comm)?;
        }
        let make = || plan::make(&config, options, device, start.clone());
        let mut plan = agree::on_plan(&*world, &config, options, device, make)?;
        plan.claim.iter().for_each(|claim| drop(events.set(claim.events().clone())));
        prepare_process(&mut plan, options, device, Some((&*world, place)), &[place.rank])?;
        run_rank(&plan, world, drill, run)
    });
    summary.map_err(TrainError::from).inspect_err(|error| {
        met.give_up();
        events.get().into_iter().for_each(|events| events.fail(error));
    })
}

/// Runs one rank of `plan`, a thread or the process itself. If the rank fails, writes its flight recording.
fn run_rank(
    plan: &Plan,
    world: Arc<dyn Communicator>,
    drill: Option<Arc<Drill>>,
    run: &impl Fn(Trainer<'_>) -> LoopResult,
) -> Result<Summary> {
    let mut flight = FlightGuard::new(&plan.out, plan.held(), world.clone());
    let trainer = Trainer::start(plan, world, drill);
    let summary = trainer.and_then(|trainer| run(trainer).map_err(TrainError::from_loop));
    flight.landed = summary.is_ok();
    summary.map_err(|error| error.with_flights(&plan.out))
}

/// Checks the kernels, limits the memory, and attaches the tools. `place` is set if this process is a single rank.
fn prepare_process(
    plan: &mut Plan,
    options: &RunOptions,
    device: &ResolvedDevice,
    place: Option<(&dyn Communicator, &RankEnv)>,
    ranks: &[usize],
) -> Result<()> {
    let begun = Instant::now();
    kernels::settle(&plan.config, &plan.model, device, place.map(|(world, _)| world))?;
    plan.start.add("check of kernels", begun.elapsed());
    let Plan { config, model, registry, optimizer, device: own, .. } = &*plan;
    memory::limit(config, model, registry.layers(), optimizer, own, place.map(|(_, place)| place));
    let Config { train, comm, log, .. } = &plan.config;
    let facts = RunFacts {
        out: &plan.out,
        ranks,
        world_size: train.ranks,
        steps: train.steps,
        deadline: comm.timeout(),
        on_gpu: plan.device.is_gpu(),
        http: log.http,
    };
    plan.tools = options.tools.as_ref().map(|tools| tools.attach(&facts));
    Ok(())
}

fn check_tools(
    options: &RunOptions,
    config: &Config,
    ranks: usize,
    with_mpi: bool,
    on_gpu: bool,
) -> Result<()> {
    let check = |tools: &Arc<dyn Tools>| tools.check(ranks, config.train.steps, with_mpi, on_gpu);
    options.tools.as_ref().map_or(Ok(()), check).map_err(TrainError::usage)
}

/// Returns `config` with the actual number of ranks, validated.
pub fn with_ranks(mut config: Config, options: &RunOptions) -> Result<Config> {
    config.train.ranks = world::ranks_of(&config, options.place.as_ref(), options.ranks)?;
    if options.place.is_none() {
        config.validate_threads()?;
        return Ok(config);
    }
    let mut checked = config.clone();
    if config.shard.strategy.is_hybrid() {
        // The size is known only once the machines of all ranks are known; see `with_groups`.
        checked.shard.shard_size.get_or_insert(config.train.ranks);
    }
    checked.validate()?;
    Ok(config)
}

fn with_groups(mut config: Config, world: &dyn Communicator) -> Result<Config> {
    let shard = &mut config.shard;
    shard.shard_size = world::shard_size(shard.strategy, shard.shard_size, world)?;
    Ok(config)
}
