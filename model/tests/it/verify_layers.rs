//! Mistakes of custom layers are found and named, and built-in layers are not accused.

use std::sync::atomic::{AtomicUsize, Ordering};

use burn::module::{Module, Param};
use burn::tensor::{Distribution, Tensor};
use kiln_model::layers::{LayerInit, Layers, Linear};
use kiln_model::verify::layers::{LayerMistake, MistakeKind, find_mistakes, try_first_block};
use kiln_model::{
    AttentionBias, BalanceOver, Context, Layer, MOE, ModelConfig, MoeConfig, PARALLEL_RESIDUAL,
};

fn config() -> ModelConfig {
    ModelConfig {
        vocab_size: 50,
        d_model: 16,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        d_ff: 24,
        dropout: 0.1,
        ..ModelConfig::preset("10m").expect("a preset")
    }
}

/// Returns models with every built-in layer and option of a layer.
fn built_in() -> Vec<ModelConfig> {
    let moe = |expert_bias, over| MoeConfig {
        norm_topk_prob: expert_bias,
        shared_expert_d_ff: Some(8),
        router_aux_loss_coef: 0.01,
        router_aux_loss_over: Some(over),
        expert_bias,
        experts: 8,
        experts_per_token: 2,
        expert_d_ff: 16,
        ..MoeConfig::default()
    };
    let moe =
        |bias, over| ModelConfig { feed_forward: MOE.to_owned(), moe: Some(moe(bias, over)), ..config() };
    let ffn = |name: &str| ModelConfig { feed_forward: name.to_owned(), ..config() };
    let window = |window| ModelConfig { window: Some(window), window_pattern: Some("wf".into()), ..config() };
    vec![
        config(),
        ffn("geglu"),
        ffn("squared_relu"),
        moe(false, BalanceOver::EachLayer),
        moe(true, BalanceOver::AllLayers),
        window(1),
        window(5),
        ModelConfig { block: Some(PARALLEL_RESIDUAL.to_owned()), ..config() },
        ModelConfig { qk_norm: true, attention_bias: AttentionBias::All, kv_heads: 4, ..config() },
        ModelConfig { tie_embeddings: false, head_dim: Some(6), kv_heads: 1, ..config() },
    ]
}

#[test]
fn built_in_layers_are_not_accused() {
    for model in built_in() {
        for seq_len in [1, 2, 8, 100] {
            let found = find_mistakes(&Layers::default(), &model, seq_len).expect("built-in layers");
            assert_eq!(found, [], "{model:?}");
            try_first_block(&Layers::default(), &model, seq_len).expect("it runs");
        }
    }
}

/// A feed-forward layer with a mistake.
#[derive(Module, Debug)]
struct Own {
    up: Linear,
    down: Linear,
    scale: Param<Tensor<1>>,
    hidden: Option<Tensor<1>>,
    #[module(skip)]
    mistake: &'static str,
}

impl Own {
    fn new(init: LayerInit, mistake: &'static str) -> Self {
        let LayerInit { model, key, device, .. } = init;
        let (d, std) = (model.d_model, model.init_std);
        let down_key = if mistake == "key" { "up" } else { "down" };
        let down_std = if mistake == "next" { 0.0 } else { std };
        let scale = match mistake {
            "unkeyed" => Tensor::random([d], Distribution::Default, device),
            _ => Tensor::ones([d], device),
        };
        let hidden = key.fork("hidden").normal_vec(d, 1.0);
        Own {
            up: Linear::new(d, d, std, key.fork("up"), device),
            down: Linear::new(d, d, down_std, key.fork(down_key), device),
            scale: Param::from_tensor(scale),
            hidden: (mistake == "hidden").then(|| Tensor::from_floats(&hidden[..], device)),
            mistake,
        }
    }
}

impl Layer for Own {
    fn forward(&self, x: Tensor<3>, context: &Context) -> Tensor<3> {
        static PASSES: AtomicUsize = AtomicUsize::new(1);
        let [_, seq, _] = x.dims();
        let x = x * self.scale.val().unsqueeze();
        let x = match self.mistake {
            // The next position; the last one becomes the first.
            "next" if seq > 1 => Tensor::cat(vec![x.clone().narrow(1, 1, seq - 1), x.narrow(1, 0, 1)], 1),
            "cache" => x.cumsum(1),
            "batch" => x.clone() + x.mean_dim(0),
            "length" => x.mul_scalar(seq as f64),
            "short" if seq < 4 => panic!("fewer than 4 tokens"),
            "cached" if context.cache().is_some() => panic!("no cache here"),
            "panics" => panic!("not done yet"),
            "random" if context.is_training() => x.mul_scalar(PASSES.fetch_add(1, Ordering::Relaxed) as f64),
            _ => x,
        };
        let x = match &self.hidden {
            Some(hidden) => x * hidden.clone().unsqueeze(),
            None => x,
        };
        let y = self.down.forward(self.up.forward(x));
        if self.mistake == "shape" { Tensor::cat(vec![y.clone(), y], 2) } else { y }
    }
}

fn own(mistake: &'static str) -> Layers {
    Layers::default().feed_forward("mine", move |init| Ok(Own::new(init, mistake)))
}

fn mine() -> ModelConfig {
    ModelConfig { feed_forward: "mine".to_owned(), ..config() }
}

#[test]
fn every_mistake_is_found_and_named() {
    let find = |mistake| find_mistakes(&own(mistake), &mine(), 100).expect("a decoder");
    let text = |found: &[LayerMistake]| found.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
    assert_eq!(text(&find("")), "");
    let place = "layers.0.ffn (\"mine\")";
    for (mistake, kind, says) in [
        (
            "next",
            MistakeKind::Causal,
            "is not causal: the last of 16 tokens changes earlier results: position 14",
        ),
        ("cache", MistakeKind::Cache, "gives another result with a key-value cache than without: position 8"),
        ("cached", MistakeKind::Cache, "panics for [2, 8] tokens with a key-value cache: no cache here"),
        (
            "length",
            MistakeKind::Length,
            "gives another result for the first 1 of 16 tokens alone: position 0",
        ),
        ("short", MistakeKind::Length, "panics for [2, 1] tokens: fewer than 4 tokens"),
        ("random", MistakeKind::Random, "gives another result when a training pass is repeated: position 0"),
        ("hidden", MistakeKind::Hidden, "depends on random values that are not parameters: position 0"),
        ("panics", MistakeKind::Panic, "panics for [2, 16] tokens: not done yet"),
        ("shape", MistakeKind::Panic, "returned [2, 16, 32] where [2, 16, 16] is needed"),
    ] {
        let found = find(mistake);
        assert!(found.iter().any(|found| found.kind == kind), "{mistake}: {}", text(&found));
        assert!(text(&found).contains(&format!("{place} {says}")), "{mistake}: {}", text(&found));
        let only = [MistakeKind::Causal, MistakeKind::Length];
        assert!(found.len() == 1 || found.iter().all(|found| only.contains(&found.kind)), "{}", text(&found));
    }
    for (mistake, says) in [
        (
            "key",
            "layers.0.ffn.up.weight and layers.0.ffn.down.weight start with equal values (of 2 such pairs)",
        ),
        ("unkeyed", "layers.0.ffn.scale starts with other values each time the model is made"),
    ] {
        assert_eq!(text(&find(mistake)), says);
    }
}

#[test]
fn a_start_finds_layers_that_cannot_run() {
    let start = |mistake| try_first_block(&own(mistake), &mine(), 32).map_err(|mistake| mistake.to_string());
    let place = "layers.0.ffn (\"mine\")";
    assert_eq!(start("next"), Ok(()));
    assert_eq!(start("shape"), Err(format!("{place} returned [1, 32, 32] where [1, 32, 16] is needed")));
    assert_eq!(start("panics"), Err(format!("{place} panics for [1, 32] tokens: not done yet")));
}
