//! The passes of a micro-batch, for [`Trainer::train_step`](super::Trainer::train_step) and for measurements.

use burn::tensor::Device;
use kiln_model::{Context, decoder};

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

/// Returns the number of micro-batches that each of `ranks` ranks computes in a step.
pub fn micro_batches(config: &Config, ranks: usize) -> usize {
    config.train.global_batch / ranks / config.micro_batch()
}

/// Runs one micro-batch's passes on `device`: forward, loss ÷ global tokens, backward. Collective.
/// After the `last` micro-batch of a step, the gradient is reduced and ready for the update.
///
/// # Errors
///
/// If the ranks lose contact.
pub fn forward_backward(
    model: &ShardedDecoder,
    config: &Config,
    device: &Device,
    batch: MicroBatch,
    last: bool,
) -> Result<()> {
    let engine = model.engine();
    let training = device.clone().autodiff();
    let (rows, seq_len) = (config.micro_batch(), config.data.seq_len);
    let scale = 1.0 / (config.train.global_batch * seq_len) as f64;
    engine.set_activity("forward");
    let inputs = device::tokens(batch.inputs, rows, seq_len, &training);
    let targets = device::tokens(batch.targets, rows, seq_len, &training);
    let loss = decoder::loss(&model.pass(&training), inputs, targets, scale, &batch.context);
    engine.check()?;
    engine.set_activity("backward");
    Ok(engine.backward(loss, last)?)
}
