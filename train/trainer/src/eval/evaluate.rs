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
    let Some(Evaluated { loss, targets, .. }) = whole else {
        unreachable!("invariant: it is not told to end early")
    };
    Ok((loss, targets))
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
    Part::new(engine, source, samples, rows).passes
}

/// A rank's part of the validation data.
struct Part<'a> {
    source: &'a BatchSource,
    rank: u64,
    ranks: u64,
    /// Samples of all ranks.
    samples: u64,
    /// Samples per pass of one rank.
    rows: usize,
    passes: u64,
}

impl<'a> Part<'a> {
    fn new(engine: &Engine, source: &'a BatchSource, samples: u64, rows: usize) -> Self {
        let (rank, ranks) = (engine.world().rank() as u64, engine.world().world_size() as u64);
        let (samples, rows) = bounded(source, samples, rows);
        Part { source, rank, ranks, samples, rows, passes: samples.div_ceil(ranks * rows as u64) }
    }

    fn shape(&self) -> [usize; 2] {
        [self.rows, self.source.seq_len()]
    }

    /// Returns the number of target tokens of all ranks.
    fn tokens(&self) -> u64 {
        self.samples * self.source.seq_len() as u64
    }

    /// Returns the sum of what `run` returns for each pass on this rank; `None` if `go_on`, the same on all ranks, returns
    /// false before the last pass. Samples that fill the last pass have negative targets and weights of 0. Collective.
    fn sum(
        &self,
        engine: &Engine,
        mut go_on: impl FnMut() -> Result<bool>,
        mut run: impl FnMut(Batch) -> Result<Tensor<1>>,
    ) -> Result<Option<f64>> {
        let mut sum = 0.0;
        for pass in 0..self.passes {
            let first = (pass * self.ranks + self.rank) * self.rows as u64;
            let mut batch = self.source.fetch(first.min(self.samples - 1), self.rows)?;
            let counted = self.samples.saturating_sub(first).min(self.rows as u64) as usize * batch.seq_len;
            batch.targets[counted..].fill(IGNORED);
            batch.weights.iter_mut().for_each(|weights| weights[counted..].fill(0.0));
            let part = run(batch)?;
            engine.check()?;
            sum += f64::from(part.into_scalar::<f32>());
            if !go_on()? && pass + 1 < self.passes {
                engine.finish_evaluation()?;
                return Ok(None);
            }
        }
        engine.finish_evaluation()?;
        Ok(Some(sum))
    }
}

/// The result of an evaluation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Evaluated {
    /// Mean loss in nats.
    pub(crate) loss: f64,
    /// Number of targets that count.
    pub(crate) targets: u64,
    /// Sum of the weights of all targets.
    weight: f64,
}

/// Like [`evaluate`], but returns `None` if `go_on`, the same on all ranks, returns false before the last pass.
pub(crate) fn evaluate_while(
    model: &ShardedDecoder,
    device: &Device,
    source: &BatchSource,
    samples: u64,
    rows: usize,
    go_on: impl FnMut() -> Result<bool>,
) -> Result<Option<Evaluated>> {
    let engine = model.engine();
    let part = Part::new(engine, source, samples, rows);
    let shape @ [rows, seq_len] = part.shape();
    let (mut weight, mut targets) = (0.0, 0);
    let loss = part.sum(engine, go_on, |batch| {
        let weights = batch.weights.map(|weights| {
            weight += weights.iter().map(|weight| f64::from(*weight)).sum::<f64>();
            targets += weights.iter().filter(|weight| **weight > 0.0).count();
            Tensor::from_data(TensorData::new(weights, shape), device)
        });
        let tokens = |ids| device::tokens(ids, rows, seq_len, device);
        let context = Context::evaluation().with_target_weights(weights);
        Ok(decoder::loss(&model.pass(device), tokens(batch.inputs), tokens(batch.targets), 1.0, &context))
    })?;
    let Some(loss) = loss else { return Ok(None) };
    if !source.is_weighted() {
        let (total, tokens) = (engine.sum_over_ranks("evaluate", &[loss])?, part.tokens());
        return Ok(Some(Evaluated {
            loss: total[0] / tokens as f64,
            targets: tokens,
            weight: tokens as f64,
        }));
    }
    let total = engine.sum_over_ranks("evaluate", &[loss, weight, targets as f64])?;
    let (loss, weight, targets) = (total[0], total[1], total[2] as u64);
    match weight > 0.0 {
        true => Ok(Some(Evaluated { loss: loss / weight, targets, weight })),
        false => Err(EvalError::NoTargets { samples: part.samples }.into()),
    }
}

/// Returns the objective of `loss` on the samples that `evaluated` has evaluated, normalised as if they were the samples
/// of one step. Otherwise like [`evaluate_while`]. Collective.
pub(crate) fn objective_while(
    model: &ShardedDecoder,
    loss: &RunLoss,
    device: &Device,
    (source, evaluated): (&BatchSource, Evaluated),
    samples: u64,
    rows: usize,
    go_on: impl FnMut() -> Result<bool>,
) -> Result<Option<f64>> {
    let engine = model.engine();
    let part = Part::new(engine, source, samples, rows);
    let shape @ [rows, seq_len] = part.shape();
    let weighting = Weighting {
        scale: evaluated.weight.recip(),
        samples: part.samples as f64,
        share: (rows * seq_len) as f64 / part.tokens() as f64,
    };
    let sum = part.sum(engine, go_on, |Batch { inputs, targets, weights, .. }| {
        let counts = || targets.iter().map(|target| f32::from(*target != IGNORED)).collect();
        let weights = Some(weights.unwrap_or_else(counts));
        let batch = MicroBatch { inputs, targets, weights, context: Context::evaluation() };
        loss.of(&model.pass(device), batch, shape, weighting, device)
    })?;
    sum.map(|sum| Ok(engine.sum_over_ranks("evaluate", &[sum])?[0])).transpose()
}
