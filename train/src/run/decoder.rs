//! Training a decoder: on ranks that are threads of this process, or as one rank of several processes.

use std::sync::Arc;

use burn::module::Module;
use burn::tensor::Device;
use kiln_collectives::Communicator;
use kiln_model::decoder::Decoder;
use kiln_model::layers::{Block, Layer};
use kiln_model::{Key, ModelConfig};
use kiln_shard::ranks::{run_rank, run_ranks};

use super::options::{RunOptions, Summary};
use super::rank::{MakeDecoder, Rank};
use super::{agree, joining, plan, surroundings};
use crate::checkpoint::Architecture;
use crate::config::{Backend, Config};
use crate::device::{self, Selected};
use crate::error::TrainError;
use crate::fault;
use crate::flight::FlightGuard;
use crate::place::Place;
use crate::process::output;
use crate::sharded::{Shapes, units_of};
use crate::world::{self, World};

/// Trains the built-in decoder.
pub fn train(config: Config, options: &RunOptions) -> Result<Summary, TrainError> {
    run_decoder(config, options, Architecture::decoder(), Block::new)
}

/// Trains a decoder with blocks of your own: `block(model, index, key, device)` makes block
/// `index`; use [`Block::key`] to name its initial weights. Checkpoints carry `name`: a program whose
/// blocks are called otherwise, and `kiln` itself, refuse them. Give blocks that compute something
/// else another name.
pub fn train_with_blocks<B: Layer>(
    config: Config,
    options: &RunOptions,
    name: &str,
    block: impl Fn(&ModelConfig, usize, Key, &Device) -> B + Sync,
) -> Result<Summary, TrainError> {
    if name.trim().is_empty() {
        return Err(TrainError::usage(
            "train_with_blocks needs a name for the blocks, such as \"squared-relu\": checkpoints \
             carry it",
        ));
    }
    run_decoder(config, options, Architecture::with_blocks(name), block)
}

/// Trains a decoder with the blocks that `block` makes.
pub(crate) fn run_decoder<B: Layer>(
    config: Config,
    options: &RunOptions,
    architecture: Architecture,
    block: impl Fn(&ModelConfig, usize, Key, &Device) -> B + Sync,
) -> Result<Summary, TrainError> {
    let _output = output::never_block();
    let decoder = |model: &ModelConfig, key: Key, device: &Device| {
        Decoder::with_blocks(model, key, device, |index| block(model, index, key, device))
    };
    surroundings::check(options)?;
    let config = with_ranks(config, options)?;
    let device = Selected::new(&config, options.place.as_ref())?;
    let decoder = RunDecoder { architecture, make: &decoder };
    match &options.place {
        None => run_as_threads(config, options, &device, &decoder),
        Some(place) => {
            let world = joining::join(place, &config.comm, &options.stop)?;
            run_as_process(&world, config, options, &device, place, &decoder)
        }
    }
}

/// [`train`] as the rank `options.place` of a world that has met already; `world` has that rank. On the
/// CPU, whose memory any world moves.
///
/// # Errors
///
/// As for [`train`], and if the configuration insists on a GPU. Other ranks hear of this one's error.
pub fn train_joined(
    world: Arc<dyn Communicator>,
    config: Config,
    options: &RunOptions,
) -> Result<Summary, TrainError> {
    let _output = output::never_block();
    let decoder = |model: &ModelConfig, key: Key, device: &Device| {
        Decoder::with_blocks(model, key, device, |index| Block::new(model, index, key, device))
    };
    let decoder = RunDecoder { architecture: Architecture::decoder(), make: &decoder };
    let config = with_ranks(config, options)?;
    match &options.place {
        None => Err(TrainError::usage("a world was given, but no place in it")),
        Some(place) => {
            let (device, world) = (Selected::for_joined(&config)?, World::given(world));
            run_as_process(&world, config, options, &device, place, &decoder)
        }
    }
}

/// The decoder of a run: what it is, and how it is made.
struct RunDecoder<'a, B: Module> {
    architecture: Architecture,
    make: &'a MakeDecoder<'a, B>,
}

/// All ranks, as threads of this process.
fn run_as_threads<B: Layer>(
    config: Config,
    options: &RunOptions,
    device: &Selected,
    decoder: &RunDecoder<'_, B>,
) -> Result<Summary, TrainError> {
    device.warn_of_idle_gpus();
    let plan =
        plan::make(&config, options, device, &decoder.architecture, |model| units(model, decoder.make))?;
    let mut summaries = run_ranks(plan.config.train.ranks, plan.threads, |world| {
        let (world, drill) = fault::rehearse(world, options.fault.as_ref(), options.job().restarts);
        let flight = FlightGuard::new(&plan.out, plan.held(), world.clone());
        let outcome = flight.watch(|| Rank::start(&plan, world, drill, decoder.make)?.run());
        outcome.map_err(|error| error.with_flights(&plan.out))
    })?;
    Ok(summaries.swap_remove(0))
}

/// This process, as one rank of `world`. Rank 0 makes the plan.
fn run_as_process<B: Layer>(
    met: &World,
    config: Config,
    options: &RunOptions,
    device: &Selected,
    place: &Place,
    decoder: &RunDecoder<'_, B>,
) -> Result<Summary, TrainError> {
    let threads = device::threads_per_rank(&config.device, device::ranks_sharing_cores(place));
    let summary = run_rank(met.communicator(), threads, |world| {
        let (world, drill) = fault::rehearse(world, options.fault.as_ref(), place.job.restarts);
        let config = with_groups(config.clone(), &*world)?;
        agree::on_config(&*world, &config, options, &decoder.architecture)?;
        if config.device.backend != Backend::Cpu {
            met.settle_on(device, &config.comm)?;
        }
        let plan = agree::on_plan(&*world, &config, options, device, || {
            plan::make(&config, options, device, &decoder.architecture, |model| units(model, decoder.make))
        })?;
        let flight = FlightGuard::new(&plan.out, plan.held(), world.clone());
        let outcome = flight.watch(|| Rank::start(&plan, world, drill, decoder.make)?.run());
        outcome.map_err(|error| error.with_flights(&plan.out))
    });
    Ok(summary.inspect_err(|_| met.give_up())?)
}

/// `config` with the number of ranks that there are, checked.
fn with_ranks(mut config: Config, options: &RunOptions) -> Result<Config, TrainError> {
    config.train.ranks = world::ranks_of(&config, options.place.as_ref(), options.ranks)?;
    if options.place.is_none() {
        config.validate_threads()?;
        return Ok(config);
    }
    let mut checked = config.clone();
    if config.shard.strategy.is_hybrid() {
        // Known once the machines of all ranks are; see `with_groups`.
        checked.shard.shard_size.get_or_insert(config.train.ranks);
    }
    checked.validate()?;
    Ok(config)
}

/// `config` with one shard group per machine, if it has groups and does not name their size.
fn with_groups(mut config: Config, world: &dyn Communicator) -> Result<Config, TrainError> {
    let shard = &mut config.shard;
    shard.shard_size = world::shard_size(shard.strategy, shard.shard_size, world)?;
    Ok(config)
}

/// The parameters of the decoder's parts.
fn units<B: Layer>(model: &ModelConfig, decoder: &MakeDecoder<'_, B>) -> Vec<Shapes> {
    // Names and shapes do not depend on the seed, and nothing is initialised.
    units_of(&decoder(model, Key::new(0), &device::plain()))
}
