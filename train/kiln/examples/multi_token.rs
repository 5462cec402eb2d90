//! Multi-token prediction (Gloeckle et al., 2024) as an objective: an extra head predicts the token after the next, from
//! the same hidden states and with the same output matrix. Evaluation and generation use the main head only.
//!
//!     cargo run --release --example multi_token -- train configs/debug.toml \
//!         --set loss.kind=multi_token --set loss.extra.weight=0.5 --set model.head_layer=second

use kiln::prelude::*;
use kiln::serde::Deserialize;

kiln::allocator!();

/// The section `[loss.extra]`.
#[derive(Deserialize)]
#[serde(crate = "kiln::serde", deny_unknown_fields)]
struct MultiToken {
    weight: f64,
}

impl Objective for MultiToken {
    fn loss(&self, pass: &Pass<'_>, batch: &TokenBatch, cx: &ObjectiveContext<'_>) -> Tensor<1> {
        let hidden = cx.hidden(pass, batch.inputs.clone());
        let next = cx.cross_entropy(pass, hidden.clone(), batch.targets.clone(), batch.weights.clone());
        let hidden = cx.head_layer(pass, hidden);
        let [batch_size, seq] = batch.targets.dims();
        // The last position has no second target: -1 is ignored.
        let end = Tensor::full([batch_size, 1], -1, &batch.targets.device());
        let targets = Tensor::cat(vec![batch.targets.clone().narrow(1, 1, seq - 1), end], 1);
        let later = |weights: Tensor<2>| {
            Tensor::cat(vec![weights.clone().narrow(1, 1, seq - 1), weights.narrow(1, 0, 1)], 1)
        };
        let second = cx.cross_entropy(pass, hidden, targets, batch.weights.clone().map(later));
        cx.record("second", second.clone().div_scalar(cx.share()));
        next + second * self.weight
    }
}

fn second(init: LayerInit) -> Result<Block, LayerError> {
    let [attention, ffn] = ["attention", "ffn"].map(|place| init.fork(place));
    Ok(Block::new(init, AnyLayer::new(Attention::new(attention)), AnyLayer::new(SwiGlu::new(ffn))))
}

fn main() -> std::process::ExitCode {
    let registry = Registry::default().head_layer("second", second);
    kiln::cli::main(registry.objective("multi_token", |init| init.extra::<MultiToken>()))
}
