//! One optimizer step, taken on data by a run (`trainer/run.rs`) or on made-up tokens by a measurement.

use burn::tensor::Device;
use kiln_model::{Context, decoder};
use kiln_shard::{Engine, LearningRates, Update};

use crate::error::Result;
use kiln_checkpoint::sharded::ShardedDecoder;
use kiln_config::Config;
use kiln_config::device;

/// The tokens of one forward and backward pass: `train.micro_batch` sequences of `data.seq_len` tokens.
#[derive(Clone, Debug)]
pub struct MicroBatch {
    /// Input tokens of all sequences, concatenated.
    pub inputs: Vec<i32>,
    /// Target tokens: for each input, the token that follows it.
    pub targets: Vec<i32>,
    /// Settings of the pass, such as dropout.
    pub context: Context,
}

/// The micro-batches of one rank and step.
pub trait MicroBatches {
    /// Returns the micro-batch `index` of the step.
    ///
    /// # Errors
    ///
    /// If it cannot be read.
    fn fetch(&mut self, index: usize) -> Result<MicroBatch>;

    /// Called after every backward pass, `last` or not. Returns whether the step continues, the same on all
    /// ranks; otherwise all ranks abandon it.
    ///
    /// # Errors
    ///
    /// If the ranks cannot agree.
    fn go_on(&mut self, last: bool) -> Result<bool>;

    /// Returns the learning rates of the update, if they differ from those at the beginning of the step.
    fn learning_rates(&self) -> Option<LearningRates> {
        None
    }

    /// Returns the norm that the gradient is clipped to, if it differs from the configuration's.
    fn grad_clip(&self) -> Option<f64> {
        None
    }

    /// Called once when the gradient of the step is reduced, before the update, so that it can be inspected.
    ///
    /// # Errors
    ///
    /// If the ranks lose each other.
    fn before_update(&mut self, _engine: &Engine) -> Result<()> {
        Ok(())
    }
}

/// Issues one optimizer step of `config` with the learning rate `lr`, or with [`LearningRates`]: forward, loss
/// ÷ global tokens and backward for every micro-batch, then the update, whose outcome
/// [`Engine::outcome`](kiln_shard::Engine::outcome) returns. Nothing in it waits for a GPU. Returns `None` if
/// the step was abandoned: weights and moments are unchanged. Collective.
///
/// # Errors
///
/// If a micro-batch cannot be fetched, or the ranks lose each other.
pub fn optimizer_step(
    model: &ShardedDecoder,
    config: &Config,
    device: &Device,
    lr: impl Into<LearningRates>,
    batches: &mut impl MicroBatches,
) -> Result<Option<Update>> {
    if !run_passes(model, config, device, batches)? {
        return Ok(None);
    }
    let engine = model.engine();
    engine.set_activity("optimizer");
    batches.before_update(engine)?;
    let grad_clip = batches.grad_clip().unwrap_or(config.optim.grad_clip);
    let lr = batches.learning_rates().unwrap_or_else(|| lr.into());
    let update = engine.update(lr, grad_clip)?;
    Ok(Some(update))
}

/// Runs the passes of an optimizer step: afterwards the gradient is reduced and ready for the update. Returns
/// whether the step continues. Collective.
pub(in crate::run) fn run_passes(
    model: &ShardedDecoder,
    config: &Config,
    device: &Device,
    batches: &mut impl MicroBatches,
) -> Result<bool> {
    let engine = model.engine();
    let training = device.clone().autodiff();
    let (rows, seq_len) = (config.micro_batch(), config.data.seq_len);
    let micro_batches = config.train.global_batch / engine.world().world_size() / rows;
    let scale = 1.0 / (config.train.global_batch * seq_len) as f64;

    engine.begin_step();
    for index in 0..micro_batches {
        engine.set_activity("data loading");
        let MicroBatch { inputs, targets, context } = batches.fetch(index)?;
        engine.set_activity("forward");
        let inputs = device::tokens(inputs, rows, seq_len, &training);
        let targets = device::tokens(targets, rows, seq_len, &training);
        let pass = model.pass(&training);
        let loss = decoder::loss(&pass, inputs, targets, scale, &context);
        engine.check()?;
        engine.set_activity("backward");
        let last = index + 1 == micro_batches;
        engine.backward(loss, last)?;
        if !batches.go_on(last)? {
            // Drops the gradients of the abandoned step and the weights gathered for it.
            engine.begin_step();
            engine.finish_evaluation()?;
            return Ok(false);
        }
    }
    Ok(true)
}
