//! Loss on the validation split.

use burn::tensor::{Device, Tensor, TensorData};
use kiln_model::Context;
use kiln_model::decoder;
use kiln_shard::Engine;

use crate::error::{EvalError, Result};
use crate::objective::Weighting;
use crate::passes::{IGNORED, MicroBatch, RunLoss};
use kiln_checkpoint::sharded::ShardedDecoder;
use kiln_config::device;
use kiln_data::{Batch, BatchSource};

/// Number of sequences to evaluate if the validation data are endless and `eval.samples` is 0.
const OF_ENDLESS: u64 = 256;

/// Returns the mean loss in nats over the first `samples` sequences (all if 0, or 256 of endless data), and the number of
/// targets that count. Collective.
/// All ranks make the same number of passes. Calls `progress` after each pass with the passes done and in total.
pub fn evaluate(
    model: &ShardedDecoder,
    device: &Device,
    source: &BatchSource,
    samples: u64,
    rows: usize,
    mut progress: impl FnMut(u64, u64),
) -> Result<(f64, u64)> {
    let (mut done, passes) = (0, passes_of(model.engine(), source, samples, rows));
    let whole = evaluate_while(model, device, source, samples, rows, || {
        done += 1;
        progress(done, passes);
        Ok(true)
    })?;
    Ok(whole.unwrap_or_else(|| unreachable!("invariant: it is not told to end early")))
}

/// Returns the number of samples of an evaluation, and the rows per pass, of which there are at most as many.
fn bounded(source: &BatchSource, samples: u64, rows: usize) -> (u64, usize) {
    let available = source.num_samples();
    let samples = match (samples, available) {
        (0, None) => OF_ENDLESS,
        (0, Some(available)) => available,
        (samples, available) => samples.min(available.unwrap_or(samples)),
    };
    let group = source.samples().group_size() as u64;
    let samples = samples.max(group) / group * group;
    (samples, rows.min(usize::try_from(samples).unwrap_or(rows)).max(1))
}

pub(crate) fn passes_of(engine: &Engine, source: &BatchSource, samples: u64, rows: usize) -> u64 {
    let (samples, rows) = bounded(source, samples, rows);
    samples.div_ceil(engine.world().world_size() as u64 * rows as u64)
}

/// Like [`evaluate`], but returns `None` if `go_on`, the same on all ranks, returns false before the last pass.
pub(crate) fn evaluate_while(
    model: &ShardedDecoder,
    device: &Device,
    source: &BatchSource,
    samples: u64,
    rows: usize,
    mut go_on: impl FnMut() -> Result<bool>,
) -> Result<Option<(f64, u64)>> {
    let engine = model.engine();
    let (rank, ranks) = (engine.world().rank() as u64, engine.world().world_size() as u64);
    let passes = passes_of(engine, source, samples, rows);
    let (samples, rows) = bounded(source, samples, rows);
    let (mut loss_sum, mut weight_sum, mut targets) = (0.0, 0.0, 0);
    for pass in 0..passes {
        let first = (pass * ranks + rank) * rows as u64;
        let mut batch = source.fetch(first.min(samples - 1), rows)?;
        let counted = samples.saturating_sub(first).min(rows as u64) as usize;
        batch.targets[counted * batch.seq_len..].fill(IGNORED);
        let weights = batch.weights.as_mut().map(|weights| {
            weights[counted * batch.seq_len..].fill(0.0);
            weight_sum += weights.iter().map(|weight| f64::from(*weight)).sum::<f64>();
            targets += weights.iter().filter(|weight| **weight > 0.0).count();
            Tensor::from_data(TensorData::new(std::mem::take(weights), [rows, batch.seq_len]), device)
        });
        let inputs = device::tokens(batch.inputs, rows, batch.seq_len, device);
        let targets = device::tokens(batch.targets, rows, batch.seq_len, device);
        let context = Context::evaluation().with_target_weights(weights);
        let loss = decoder::loss(&model.pass(device), inputs, targets, 1.0, &context);
        engine.check()?;
        loss_sum += f64::from(loss.into_scalar::<f32>());
        if !go_on()? && pass + 1 < passes {
            engine.finish_evaluation()?;
            return Ok(None);
        }
    }
    engine.finish_evaluation()?;
    let tokens = samples * source.seq_len() as u64;
    if !source.is_weighted() {
        let total = engine.sum_over_ranks("evaluate", &[loss_sum])?;
        return Ok(Some((total[0] / tokens as f64, tokens)));
    }
    let total = engine.sum_over_ranks("evaluate", &[loss_sum, weight_sum, targets as f64])?;
    if total[1] == 0.0 {
        return Err(EvalError::NoTargets { samples }.into());
    }
    Ok(Some((total[0] / total[1], total[2] as u64)))
}

/// Returns the objective of `loss` on the first `samples` sequences (all if 0), normalised as if they were the samples of
/// one step. Otherwise like [`evaluate_while`]. Collective.
pub(crate) fn objective_while(
    model: &ShardedDecoder,
    loss: &RunLoss,
    device: &Device,
    source: &BatchSource,
    samples: u64,
    rows: usize,
    mut go_on: impl FnMut() -> Result<bool>,
) -> Result<Option<f64>> {
    let engine = model.engine();
    let (rank, ranks) = (engine.world().rank() as u64, engine.world().world_size() as u64);
    let passes = passes_of(engine, source, samples, rows);
    let (samples, rows) = bounded(source, samples, rows);
    // The batch of a pass, with a weight of 0 for the targets that do not count.
    let fetch = |pass: u64| -> Result<(Batch, Vec<f32>)> {
        let first = (pass * ranks + rank) * rows as u64;
        let mut batch = source.fetch(first.min(samples - 1), rows)?;
        let counted = samples.saturating_sub(first).min(rows as u64) as usize;
        let mut weights = batch.weights.take().unwrap_or_else(|| vec![1.0; rows * batch.seq_len]);
        weights[counted * batch.seq_len..].fill(0.0);
        batch.targets[counted * batch.seq_len..].fill(IGNORED);
        Ok((batch, weights))
    };
    let tokens = (samples * source.seq_len() as u64) as f64;
    let total = if source.is_weighted() {
        let mut own = 0.0;
        for pass in 0..passes {
            own += fetch(pass)?.1.iter().map(|weight| f64::from(*weight)).sum::<f64>();
        }
        engine.sum_over_ranks("evaluate", &[own])?[0]
    } else {
        tokens
    };
    let shape = [rows, source.seq_len()];
    let share = shape.iter().product::<usize>() as f64 / tokens;
    let weighting = Weighting { scale: total.recip(), samples: samples as f64, share };
    let mut sum = 0.0;
    for pass in 0..passes {
        let (Batch { inputs, targets, .. }, weights) = fetch(pass)?;
        let batch = MicroBatch { inputs, targets, weights: Some(weights), context: Context::evaluation() };
        let part = loss.of(&model.pass(device), batch, shape, weighting, device)?;
        engine.check()?;
        sum += f64::from(part.into_scalar::<f32>());
        if !go_on()? && pass + 1 < passes {
            engine.finish_evaluation()?;
            return Ok(None);
        }
    }
    engine.finish_evaluation()?;
    Ok(Some(engine.sum_over_ranks("evaluate", &[sum])?[0]))
}
