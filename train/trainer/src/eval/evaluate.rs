//! Loss on the validation split.

use burn::tensor::Device;
use kiln_model::Context;
use kiln_model::decoder;
use kiln_shard::Engine;

use crate::error::Result;
use kiln_checkpoint::sharded::ShardedDecoder;
use kiln_config::device;
use kiln_data::BatchSource;

const IGNORED: i32 = -1;

/// Returns the mean loss in nats over the first `samples` sequences (all if 0), and the number of tokens. Collective.
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
    let available = source.order().num_samples();
    let samples = if samples == 0 { available } else { samples.min(available) };
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
    let mut loss_sum = 0.0;
    for pass in 0..passes {
        let first = (pass * ranks + rank) * rows as u64;
        let mut batch = source.fetch(first.min(samples - 1), rows)?;
        let counted = samples.saturating_sub(first).min(rows as u64) as usize;
        batch.targets[counted * batch.seq_len..].fill(IGNORED);
        let inputs = device::tokens(batch.inputs, rows, batch.seq_len, device);
        let targets = device::tokens(batch.targets, rows, batch.seq_len, device);
        let context = Context::evaluation();
        let loss = decoder::loss(&model.pass(device), inputs, targets, 1.0, &context);
        engine.check()?;
        loss_sum += f64::from(loss.into_scalar::<f32>());
        if !go_on()? && pass + 1 < passes {
            engine.finish_evaluation()?;
            return Ok(None);
        }
    }
    engine.finish_evaluation()?;
    let total = engine.sum_over_ranks("evaluate", &[loss_sum])?;
    let tokens = samples * source.file().seq_len() as u64;
    Ok(Some((total.iter().sum::<f64>() / tokens as f64, tokens)))
}
