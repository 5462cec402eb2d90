//! The stages `step` and `save`: take a reduced step of the model, and save and load a checkpoint of it.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::tensor::Device;
use kiln_collectives::{Communicator, Label, Phase};
use kiln_model::{Decoder, Key, ModelConfig};
use kiln_shard::{EngineBuilder, Optimizer, Outcome, ShardError};

use super::env::nearest;
use super::model::{Trained, elements};
use crate::bench;
use crate::smoke::{Smoke, forget_absent};
use kiln_checkpoint::sharded::{ShardedDecoder, parameter_shapes};
use kiln_checkpoint::source::ModelSource;
use kiln_checkpoint::weights::AllowMissing;
use kiln_checkpoint::{Checkpoint, CheckpointState, SaveContext, SaveOptions, Saver};
use kiln_config::device::{self, ResolvedDevice};
use kiln_config::{Config, ConfigError, ModelSection};
use kiln_train::error::{Result, TrainError};
use kiln_train::losses::Loss;
use kiln_train::passes::RunLoss;
use kiln_train::registry::Registry;
use kiln_train::run::CHECK_PREFIX;
use kiln_train::world;

/// Maximum number of parameters for a step of the whole model; larger models are narrowed to keep the check quick.
const WHOLE: u64 = 16_000_000;

/// Maximum relative difference on a GPU, whose kernels sum in any order. On the CPU, the bits must be equal.
const TOLERANCE: f64 = 1e-3;

/// Steps to compare after loading: the first depends on the weights alone, the second also on the optimizer state.
const COMPARED: [u64; 2] = [2, 3];

pub(super) struct Shrunk {
    config: Config,
    model: ModelConfig,
    optimizer: Optimizer,
    loss: Loss,
    registry: Registry,
    device: Device,
    narrow: bool,
    tolerance: f64,
}

/// A run on little data.
pub(super) struct Reduced {
    config: Config,
    pub(super) model: ModelConfig,
    narrow: bool,
}

/// Reduces the run to little data, and a large model to two narrow blocks with the same layers.
pub(super) fn reduced(parts: &Trained) -> Result<Reduced> {
    let mut config = parts.config.clone();
    config.model = ModelSection::from_model(&parts.model);
    config.init.from = PathBuf::new();
    let narrow = elements(&parts.shapes) > WHOLE;
    (if narrow { Smoke::Width } else { Smoke::Batch }).shrink(&mut config);
    let model = config.resolve_model(None, None).map_err(ConfigError::invalid)?;
    Ok(Reduced { config, model, narrow })
}

impl Shrunk {
    /// Reduces the run to a step on little data, and a large model as [`reduced`] does.
    pub(super) fn new(parts: &Trained, registry: &Registry, device: &ResolvedDevice) -> Result<Self> {
        let Reduced { mut config, model, narrow } = reduced(parts)?;
        if narrow {
            let decoder = Decoder::new(registry.layers(), &model, Key::new(0), &device::plain())?;
            forget_absent(&mut config, &decoder);
        }
        let optimizer = registry.optimizers().make(&config.optim)?;
        let loss = registry.losses().make(&config.loss, model.vocab_size)?;
        let tolerance = if device.is_gpu() { TOLERANCE } else { 0.0 };
        let (registry, device) = (registry.clone(), device.device());
        Ok(Shrunk { config, model, optimizer, loss, registry, device, narrow, tolerance })
    }

    fn build(&self, world: Arc<dyn Communicator>, is_loaded: bool) -> Result<ShardedDecoder> {
        let Shrunk { config, model, optimizer, registry, device, .. } = self;
        let shard = &config.shard;
        let shard_size = world::shard_size(shard.strategy, shard.shard_size, &*world)?;
        let builder = EngineBuilder::new(world, config.policy(), shard_size)?
            .optimizer(optimizer.clone())
            .freeze(config.frozen())
            .load_later(move |_| is_loaded);
        let decoder =
            Decoder::new(registry.layers(), model, Key::new(config.train.seed).fork("init"), device)?;
        Ok(ShardedDecoder::new(decoder, builder)?)
    }

    fn load_loss(&self, world: &Arc<dyn Communicator>) -> Result<RunLoss> {
        RunLoss::load_with(self.loss.clone(), &self.config, world, |path, builder| {
            self.load_frozen(path, builder)
        })
    }

    /// Loads a frozen model, or makes two narrow blocks with the layers of a large one.
    fn load_frozen(&self, path: &Path, builder: EngineBuilder) -> Result<ShardedDecoder> {
        let Shrunk { config, registry, device, .. } = self;
        let (source, layers) = (ModelSource::open_with(path, registry.layers())?, registry.layers());
        let decoder = |model: &ModelConfig| Decoder::new(layers, model, Key::new(0), device);
        if elements(&parameter_shapes(&decoder(source.model())?)) <= WHOLE {
            return Ok(source.decoder(layers, builder, device)?);
        }
        source.check_weights_are_there(layers)?;
        Ok(ShardedDecoder::new(decoder(&narrowed(config, source.model())?)?, builder)?)
    }

    fn step_of(&self, model: &ShardedDecoder, loss: &RunLoss, number: u64) -> Result<Outcome> {
        let Shrunk { config, device, .. } = self;
        let (_, outcome) = bench::step_with_outcome(config, model, device, loss, number)?;
        let problem = |what| TrainError::Crash(format!("the shrunk step {what}"));
        // Loss scaling for f16 may start with a scale at which gradients overflow.
        match outcome.applied || outcome.overflowed {
            true => Ok(outcome),
            false => Err(problem(format!(
                "has a loss of {} and a gradient of norm {}{}: lower optim.lr, or check the custom layers of the model",
                outcome.loss,
                outcome.grad_norm,
                kiln_train::error::in_gradient(&outcome.non_finite)
            ))),
        }
    }

    pub(super) fn step(&self, world: Arc<dyn Communicator>) -> Result<String> {
        let objective = self.load_loss(&world)?;
        let model = self.build(world, false)?;
        let start = Instant::now();
        let Outcome { loss, grad_norm, .. } = self.step_of(&model, &objective, 1)?;
        let seconds = start.elapsed().as_secs_f64();
        let Config { train, data, .. } = &self.config;
        let of = if self.narrow { "two narrow blocks with its layers" } else { "this model" };
        Ok(format!(
            "{of}, {} made-up sequences of {} tokens: loss {loss:.3}, gradient {grad_norm:.2}; {seconds:.2} s",
            train.global_batch, data.seq_len
        ))
    }

    /// Saves and loads a temporary checkpoint, and checks that the next steps are the same as without loading.
    /// Returns text for the table. The checkpoint is in the existing folder nearest to `out`. Collective.
    pub(super) fn save(&self, world: Arc<dyn Communicator>, out: &Path) -> Result<String> {
        let (rank, timeout) = (world.rank(), self.config.comm.timeout());
        let place = nearest(out);
        let folder =
            (rank == 0).then(|| tempfile::Builder::new().prefix(CHECK_PREFIX).tempdir_in(place)).transpose();
        let folder = folder.map_err(TrainError::io("create a folder in", place))?;
        let name = folder.as_ref().and_then(|folder| folder.path().file_name());
        let gathered = world::gather(&*world, "folder", name.map_or(&[], OsStr::as_bytes), timeout)?;
        let report = self.save_in(&world, place.join(OsStr::from_bytes(&gathered[0])))?;
        let barrier = world.barrier(Label::new("folder", Phase::Checkpoint));
        barrier.wait(timeout).map_err(ShardError::from)?;
        drop(folder);
        Ok(report)
    }

    fn save_in(&self, world: &Arc<dyn Communicator>, folder: PathBuf) -> Result<String> {
        let config = &self.config;
        let model = self.build(world.clone(), false)?;
        let loss = self.load_loss(world)?;
        let first = self.step_of(&model, &loss, 1)?;
        let state = CheckpointState {
            skipped: u64::from(!first.applied),
            loss_scale: first.loss_scale,
            seed: config.train.seed,
            ..CheckpointState::new(self.model.clone(), config.data.seq_len)
                .at(1, config.train.global_batch as u64)
        };
        let options = SaveOptions {
            format: config.checkpoint.format,
            timeout: config.checkpoint.timeout(),
            ..SaveOptions::new(folder)
        };
        let start = Instant::now();
        let place = Saver::new(options, world.rank()).begin(model.engine(), SaveContext::new(state))?;
        let place = place.ok_or_else(|| TrainError::Crash("nothing was saved".to_owned()))?;
        let saved = start.elapsed();
        let start = Instant::now();
        let checkpoint = Checkpoint::open(&place)?;
        let again = self.build(world.clone(), true)?;
        checkpoint.reader().load_weights(again.engine(), &AllowMissing::default())?;
        checkpoint.reader().load_optimizer(again.engine(), &AllowMissing::default())?;
        let loaded = start.elapsed();
        let mut is_compared = true;
        for (number, after) in COMPARED.into_iter().zip(["step", "second step"]) {
            let (here, there) = (self.step_of(&model, &loss, number)?, self.step_of(&again, &loss, number)?);
            // A gradient that overflows has no finite norm to compare.
            is_compared &= !(here.overflowed && there.overflowed);
            let [here, there] = [here, there].map(|outcome| [outcome.loss, outcome.grad_norm]);
            if is_compared && !here.iter().zip(&there).all(|(a, b)| is_near(*a, *b, self.tolerance)) {
                return Err(TrainError::Crash(format!(
                    "the {after} has loss and norm {there:?} after loading the checkpoint, and {here:?} without: check \
                     the custom layers and optimizer, which may keep state that checkpoints do not store"
                )));
            }
        }
        let seconds = |time: Duration| time.as_secs_f64();
        let bytes = kiln_sys::words::size(checkpoint.manifest().bytes());
        Ok(format!(
            "{bytes} saved in {:.2} s and loaded in {:.2} s, {}",
            seconds(saved),
            seconds(loaded),
            if is_compared { "with the same next steps" } else { "the next steps overflowed, not compared" }
        ))
    }
}

/// Returns a model of two narrow blocks with the layers and the vocabulary of `model`.
fn narrowed(config: &Config, model: &ModelConfig) -> Result<ModelConfig> {
    let mut config = Config { model: ModelSection::from_model(model), ..config.clone() };
    Smoke::Width.shrink(&mut config);
    Ok(config.model.resolve(None).map_err(ConfigError::invalid)?)
}

/// Returns whether the values of a step with and without loading agree. A value that is not finite never agrees.
fn is_near(here: f64, there: f64, tolerance: f64) -> bool {
    here == there || (here - there).abs() < tolerance * here.abs()
}

#[cfg(test)]
mod tests {
    use super::{TOLERANCE, is_near, narrowed};
    use kiln_config::Config;
    use kiln_model::{Layers, ModelConfig};

    #[test]
    fn a_narrowed_model_has_the_vocabulary_and_few_parameters() {
        let large = ModelConfig { vocab_size: 3000, ..ModelConfig::preset("1b").expect("a preset") };
        let small = narrowed(&Config::default(), &large).expect("a model");
        let layers = |model: &ModelConfig| (model.attention.clone(), model.feed_forward.clone());
        assert_eq!((small.vocab_size, layers(&small)), (3000, layers(&large)));
        let parameters =
            |model| kiln_model::Decoder::count_parameters(&Layers::default(), model).expect("layers");
        assert!(parameters(&small) < 1_000_000 && parameters(&large) > 500_000_000);
    }

    #[test]
    fn nan_never_agrees() {
        assert!(is_near(2.0, 2.0, 0.0) && !is_near(2.0, 2.0_f64.next_up(), 0.0));
        let is_near = |here, there| is_near(here, there, TOLERANCE);
        assert!(is_near(2.0, 2.001) && is_near(0.0, 0.0) && is_near(f64::INFINITY, f64::INFINITY));
        assert!(!is_near(2.0, 2.01) && !is_near(2.0, f64::NAN) && !is_near(f64::NAN, 2.0));
        assert!(!is_near(f64::INFINITY, 2.0) && !is_near(2.0, f64::INFINITY));
    }
}
