//! The passes of a micro-batch, for [`Trainer::train_step`](crate::run::Trainer::train_step) and for measurements.

use std::path::Path;
use std::sync::Arc;

use burn::tensor::{Device, Tensor, TensorData};
use kiln_collectives::Communicator;
use kiln_model::{Context, Layers, decoder};
use kiln_shard::EngineBuilder;

use crate::error::{Result, TrainError};
use crate::losses::Loss;
use crate::objective::{ObjectiveContext, TokenBatch, Weighting, check_frozen};
use crate::world::shard_size;
use kiln_checkpoint::sharded::{Pass, ShardedDecoder};
use kiln_checkpoint::source::ModelSource;
use kiln_config::Config;
use kiln_config::device;

/// Marks a target that the loss ignores.
pub(crate) const IGNORED: i32 = -1;

/// The tokens of one forward and backward pass: `train.micro_batch` sequences of `data.seq_len` tokens.
#[derive(Clone, Debug)]
pub struct MicroBatch {
    /// Input tokens of all sequences, concatenated.
    pub inputs: Vec<i32>,
    /// Target tokens: for each input, the token that follows it.
    pub targets: Vec<i32>,
    /// A weight for each target, if the data have weights.
    pub weights: Option<Vec<f32>>,
    /// Settings of the pass, such as dropout.
    pub context: Context,
}

/// The loss of a run, with the frozen models that it reads.
pub struct RunLoss {
    loss: Loss,
    /// Models of `[loss.frozen]`, by name.
    frozen: Vec<(String, ShardedDecoder)>,
}

impl RunLoss {
    /// Loads the frozen models of `loss` on `device`, sharded like the trained model. Collective.
    ///
    /// # Errors
    ///
    /// If a model cannot be loaded, or the ranks lose contact.
    pub fn load(
        loss: Loss,
        layers: &Layers,
        config: &Config,
        world: &Arc<dyn Communicator>,
        device: &Device,
    ) -> Result<Self> {
        RunLoss::load_with(loss, config, world, |path, builder| {
            Ok(ModelSource::open(path)?.decoder(layers, builder, device)?)
        })
    }

    /// Creates the frozen models of `loss` with `load`, from a path and a builder. Collective.
    ///
    /// # Errors
    ///
    /// If `load` fails, or the ranks lose contact.
    pub fn load_with(
        loss: Loss,
        config: &Config,
        world: &Arc<dyn Communicator>,
        load: impl Fn(&Path, EngineBuilder) -> Result<ShardedDecoder>,
    ) -> Result<Self> {
        let Loss::Objective(_, models) = &loss else { return Ok(RunLoss { loss, frozen: Vec::new() }) };
        let load = |path| -> Result<ShardedDecoder> {
            let shard_size = shard_size(config.shard.strategy, config.shard.shard_size, &**world)?;
            let builder = EngineBuilder::new(world.clone(), config.policy(), shard_size)?;
            load(path, builder.freeze(|_| true))
        };
        let frozen = models.iter().map(|model| Ok((model.name.clone(), load(&model.path)?)));
        let frozen = frozen.collect::<Result<_>>()?;
        Ok(RunLoss { loss, frozen })
    }

    /// Returns whether this is an objective that evaluations compute.
    pub(crate) fn is_evaluated(&self) -> bool {
        matches!(&self.loss, Loss::Objective(objective, _) if objective.is_evaluated())
    }

    /// Returns the loss of `batch`, of `shape` `[rows, seq_len]`, on `device`, `[1]`.
    pub(crate) fn of(
        &self,
        pass: &Pass<'_>,
        batch: MicroBatch,
        shape: [usize; 2],
        weighting: Weighting,
        device: &Device,
    ) -> Result<Tensor<1>> {
        let MicroBatch { inputs, targets, weights, context } = batch;
        let [rows, seq_len] = shape;
        let tokens = |ids| device::tokens(ids, rows, seq_len, device);
        let on_device = |weights| Tensor::from_data(TensorData::new(weights, shape), device);
        let objective = match &self.loss {
            Loss::Objective(objective, _) => objective,
            loss => {
                let (mut context, mut targets) = (context.with_token_loss(loss.token().cloned()), targets);
                if let Some(weights) = weights {
                    let masked = targets.iter_mut().zip(&weights).filter(|(_, weight)| **weight == 0.0);
                    masked.for_each(|(target, _)| *target = IGNORED);
                    // The fused cross-entropy skips masked targets by itself.
                    let is_mask = weights.iter().all(|weight| [0.0, 1.0].contains(weight));
                    let needed = (!is_mask || loss.token().is_some()).then(|| on_device(weights));
                    context = context.with_share(weighting.share).with_target_weights(needed);
                }
                return Ok(decoder::loss(pass, tokens(inputs), tokens(targets), weighting.scale, &context));
            }
        };
        let cx = ObjectiveContext::new(weighting, &context, &self.frozen, device);
        let weights = weights.map(on_device);
        let batch = TokenBatch { inputs: tokens(inputs), targets: tokens(targets), weights };
        let loss = objective.loss(pass, &batch, &cx);
        check_frozen(&self.frozen)?;
        let (runs, declared) = (pass.runs(), objective.runs());
        if runs != declared {
            return Err(TrainError::usage(format!(
                "the objective has run the model {runs} times on a micro-batch, and Objective::runs declares \
                 {declared}: correct it, so that all ranks agree"
            )));
        }
        if loss.dims() != [1] {
            let shape = loss.dims();
            return Err(TrainError::usage(format!(
                "the objective returned {shape:?} instead of one value, [1]"
            )));
        }
        Ok(cx.total(loss))
    }
}

impl From<Loss> for RunLoss {
    /// Wraps a loss without frozen models.
    fn from(loss: Loss) -> Self {
        RunLoss { loss, frozen: Vec::new() }
    }
}

/// Returns the number of micro-batches that each of `ranks` ranks computes in a step.
pub fn micro_batches(config: &Config, ranks: usize) -> usize {
    config.train.global_batch / ranks / config.micro_batch()
}

/// Returns the number of target tokens of a step, over all ranks and micro-batches.
pub fn tokens_of_step(config: &Config) -> f64 {
    (config.train.global_batch * config.data.seq_len) as f64
}

/// Runs one micro-batch's passes on `device`: forward, loss ÷ `counted`, backward. Collective. `counted` is the sum of
/// the weights of all targets of the step: [`tokens_of_step`] if the data have no weights. After the `last`
/// micro-batch of a step, the gradient is reduced and ready for the update.
///
/// # Errors
///
/// If the ranks lose contact, or an objective breaks its contract.
pub fn forward_backward(
    model: &ShardedDecoder,
    loss: &RunLoss,
    config: &Config,
    device: &Device,
    batch: MicroBatch,
    counted: f64,
    last: bool,
) -> Result<()> {
    let engine = model.engine();
    let training = device.clone().autodiff();
    let shape @ [rows, seq_len] = [config.micro_batch(), config.data.seq_len];
    let weighting = Weighting {
        // In a step without any weight, every loss is 0.
        scale: if counted > 0.0 { 1.0 / counted } else { 0.0 },
        samples: config.train.global_batch as f64,
        share: (rows * seq_len) as f64 / tokens_of_step(config),
    };
    engine.set_activity("forward");
    let loss = loss.of(&model.pass(&training), batch, shape, weighting, &training)?;
    engine.check()?;
    if !loss.is_tracked() {
        return Err(TrainError::usage(
            "the loss depends on no trained parameter: train other parameters (train.freeze, train.train_only), or \
             compute the loss from the model",
        ));
    }
    engine.set_activity("backward");
    Ok(engine.backward(loss, last)?)
}
