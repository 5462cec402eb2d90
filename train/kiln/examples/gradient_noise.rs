//! The simple noise scale (McCandlish et al., 2018, "An Empirical Model of Large-Batch Training", appendix A.1): the batch
//! size, in samples, up to which a larger batch saves steps almost in proportion. It follows from the norms of two
//! gradients at the same weights: the gradient of the step, and that of a small batch.
//!
//!     cargo run --release --example gradient_noise -- train configs/quickstart.toml --set experiment.small_batch=2
//!
//! `noise_scale` is `gradient_variance` divided by `gradient_squared`. Both are unbiased, but a single step's are noisy and may
//! be negative: average each over many steps, then divide.

use kiln::prelude::*;
use kiln::serde::Deserialize;

kiln::allocator!();

/// The section `[experiment]`.
#[derive(Deserialize)]
#[serde(crate = "kiln::serde", deny_unknown_fields)]
struct Experiment {
    /// Samples of the small batch: a multiple of the number of ranks, each of which computes its share in one pass.
    small_batch: u64,
}

/// Returns the norm of the gradient of `batches` at the current weights, and drops the gradient. Collective.
fn gradient_norm(trainer: &Trainer<'_>, batches: &Batches) -> Result<f64, TrainError> {
    let (engine, config, device) = (trainer.engine(), trainer.config(), trainer.device().clone().autodiff());
    let batch = batches.for_rank(trainer.step(), &**engine.world(), &device)?;
    let key = Key::new(config.train.seed).fork("noise");
    let context = Context::training(key, batch.first_sample, config.model.dropout.unwrap_or(0.0));
    engine.begin_step();
    let loss =
        decoder::loss(&trainer.model().pass(&device), batch.inputs, batch.targets, batch.scale, &context);
    engine.backward(loss, true)?;
    let norm = engine.grad_norm()?;
    engine.begin_step();
    Ok(norm)
}

fn train(mut trainer: Trainer<'_>) -> LoopResult {
    let config = trainer.config().clone();
    let Experiment { small_batch } = config.experiment()?;
    if !(1..config.train.global_batch as u64).contains(&small_batch) {
        return Err(
            ConfigError::invalid("experiment.small_batch must be smaller than train.global_batch").into()
        );
    }
    let batches = Batches::open(&config.data.path, config.data.seq_len, small_batch, config.train.seed)?;
    loop {
        if config.log.is_logged(trainer.step() + 1, config.train.steps) {
            let norm = gradient_norm(&trainer, &batches)?;
            trainer.record("small_grad_norm", norm);
        }
        if !trainer.train_step()? {
            return Ok(trainer.finish()?);
        }
        if trainer.step().is_multiple_of(config.checkpoint.every.max(1)) {
            trainer.save()?;
        }
    }
}

/// Returns unbiased estimates of the square of the expected gradient, and of the sum of its variances for one sample.
fn estimates(step: &LoggedStep<'_>) -> Result<[f64; 2], ConfigError> {
    let Experiment { small_batch } = step.config.experiment()?;
    let [small, big] = [small_batch as f64, step.config.train.global_batch as f64];
    let of_small = step.metrics.values.get("small_grad_norm").unwrap_or(f64::NAN).powi(2);
    let of_big = step.metrics.grad_norm.powi(2);
    let squared = (big * of_big - small * of_small) / (big - small);
    let variance = (of_small - of_big) / (1.0 / small - 1.0 / big);
    Ok([squared, variance])
}

fn main() -> std::process::ExitCode {
    let registry = Registry::default()
        .metric("gradient_squared", |step| Ok(estimates(step)?[0]))
        .metric("gradient_variance", |step| Ok(estimates(step)?[1]))
        .metric("noise_scale", |step| {
            let [squared, variance] = estimates(step)?;
            Ok(variance / squared)
        });
    kiln::cli::main(registry.training_loop(train))
}
