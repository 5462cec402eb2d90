//! Custom metrics, and a layer that records a value, in `metrics.jsonl` of every `kiln train`:
//!
//!     cargo run --release --example own_metric -- train configs/quickstart.toml \
//!         --set model.feed_forward=watched

use std::process::ExitCode;

use burn::module::Module;
use burn::tensor::{Tensor, activation::relu};
use kiln::logged::{LoggedStep, MetricResult};
use kiln::process::CountingAllocator;
use kiln::registry::Registry;
use kiln_model::layers::{Context, Layer, LayerError, LayerInit, Linear};
use kiln_shard::StateKind;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// `down(relu(up(x)))`, which records the share of its hidden values that are active.
#[derive(Module, Debug)]
struct Watched {
    up_proj: Linear,
    down_proj: Linear,
}

impl Watched {
    fn new(init: LayerInit) -> Result<Self, LayerError> {
        let LayerInit { model, key, device, .. } = init;
        let (d, ff) = (model.d_model, model.d_ff);
        Ok(Watched {
            up_proj: Linear::new(d, ff, model.init_std, key.fork("up_proj"), device),
            down_proj: Linear::new(ff, d, model.residual_std(), key.fork("down_proj"), device),
        })
    }
}

impl Layer for Watched {
    fn forward(&self, x: Tensor<3>, context: &Context) -> Tensor<3> {
        let h = relu(self.up_proj.forward(x));
        // In logged steps, written as `layers.0.ffn.active` and `layers.mean.ffn.active`.
        if context.is_recording() {
            context.record("active", h.clone().greater_elem(0.0).float().mean());
        }
        self.down_proj.forward(h)
    }
}

/// Returns the perplexity of the training loss.
fn perplexity(step: &LoggedStep<'_>) -> MetricResult {
    Ok(step.metrics.loss.exp())
}

/// Returns the norm of all weights. Every rank sums the squares of its shards.
fn weight_norm(step: &LoggedStep<'_>) -> MetricResult {
    let squares = step.engine.weight_norms()?.into_iter().map(|(_, norm)| norm * norm);
    Ok(squares.sum::<f64>().sqrt())
}

/// Returns the largest weight of the embedding. Every rank contributes the largest weight of its shard.
fn largest_embedding(step: &LoggedStep<'_>) -> MetricResult {
    let largest =
        |_, values: &[f32]| values.iter().fold(0.0, |most: f64, value| most.max(f64::from(value.abs())));
    let mine = step.engine.read_parameter("embed_tokens.weight", StateKind::Weight, largest)?;
    let world = step.engine.world();
    let mut of_ranks = vec![0.0; world.world_size()];
    of_ranks[world.rank()] = mine.unwrap_or(0.0);
    let of_ranks = step.engine.sum_over_ranks("largest_embedding", &of_ranks)?;
    Ok(of_ranks.into_iter().fold(0.0, f64::max))
}

fn main() -> ExitCode {
    let registry = Registry::default()
        .layer("watched", Watched::new)
        .metric("perplexity", perplexity)
        .metric("weight_norm", weight_norm)
        .metric("largest_embedding", largest_embedding);
    kiln::cli::main(registry)
}
