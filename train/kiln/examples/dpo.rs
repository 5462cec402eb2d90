//! Direct preference optimization (Rafailov et al., 2023) as an objective. Sample 2i of the data is the preferred
//! answer to a prompt, sample 2i + 1 the other one; prompts have weight 0. The reference is a frozen model:
//!
//!     dpo train run.toml --set data.source=pairs --set loss.kind=dpo --set loss.frozen.reference=runs/base

use kiln::burn::tensor::activation::log_sigmoid;
use kiln::prelude::*;
use kiln::serde::Deserialize;

kiln::allocator!();

/// The section `[loss.extra]`.
#[derive(Deserialize)]
#[serde(crate = "kiln::serde", deny_unknown_fields)]
struct Settings {
    beta: f64,
}

/// Preferred answers go up from the last token of the prompt, others down.
struct Pairs;

impl DataSource for Pairs {
    fn vocab_size(&self) -> usize {
        32
    }

    fn group_size(&self) -> usize {
        2
    }

    fn sample(&self, split: Split, index: u64) -> Result<Sample, SourceError> {
        let prompt = Key::new(index / 2).fork(split.name()).ids(0, 5, 32);
        let step = if index.is_multiple_of(2) { 1 } else { 31 };
        let answer = (1..=12).map(|i| (prompt[4] + i * step) % 32);
        let tokens = prompt.iter().copied().chain(answer).map(i32::cast_unsigned).collect();
        Ok(Sample { tokens, weights: [vec![0.0; 4], vec![1.0; 12]].concat() })
    }
}

/// The mean of `-log σ(β (log π(y)/π_ref(y) - log π(y')/π_ref(y')))` over the pairs.
fn dpo(init: LossInit) -> Result<impl Objective + use<>, ConfigError> {
    let Settings { beta } = init.extra()?;
    let reference = init.frozen_model("reference")?;
    Ok(move |pass: &Pass<'_>, batch: &TokenBatch, cx: &ObjectiveContext<'_>| {
        let TokenBatch { inputs, targets, .. } = batch;
        let before = cx.frozen(&reference).log_probabilities(inputs, targets);
        let log_p = cx.log_probabilities(pass, inputs.clone(), targets.clone());
        let pairs = inputs.dims()[0] / 2;
        let ratios = ((log_p - before) * batch.weights()).sum_dim(1).reshape([pairs, 2]);
        let margin = ratios.clone().narrow(1, 0, 1) - ratios.narrow(1, 1, 1);
        cx.record("margin", margin.clone().mean());
        // In an evaluation, samples without weights do not count.
        let counts = batch.weights().max_dim(1).reshape([pairs, 2]).min_dim(1);
        (log_sigmoid(margin * beta) * counts).sum().mul_scalar(-2.0 / cx.samples())
    })
}

fn main() -> std::process::ExitCode {
    kiln::cli::main(Registry::default().objective("dpo", dpo).data("pairs", |_| Ok(Pairs)))
}
