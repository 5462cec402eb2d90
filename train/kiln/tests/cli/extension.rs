//! A layer defined outside the crates: written here, put into the decoder's blocks, and trained under every
//! strategy. docs/change-the-model.md walks through this file.

use std::path::Path;

use burn::module::Module;
use burn::tensor::Tensor;
use burn::tensor::activation::relu;
use kiln::registry::Registry;
use kiln::run::{Resume, RunOptions, Summary};
use kiln_model::layers::{Context, Layer, LayerInit, Linear};
use safetensors::SafeTensors;

use crate::support::{VOCAB, Workspace, assert_same_curve};

/// `down(relu(up(x))²)` (So et al., 2021).
#[derive(Module, Debug)]
struct SquaredRelu {
    /// `[d_model, d_ff]`.
    up_proj: Linear,
    /// `[d_ff, d_model]`.
    down_proj: Linear,
}

impl SquaredRelu {
    fn new(LayerInit { model, key, device, .. }: LayerInit) -> Self {
        let (d, ff) = (model.d_model, model.d_ff);
        SquaredRelu {
            up_proj: Linear::new(d, ff, model.init_std, key.fork("up_proj"), device),
            down_proj: Linear::new(ff, d, model.residual_std(), key.fork("down_proj"), device),
        }
    }
}

impl Layer for SquaredRelu {
    fn forward(&self, x: Tensor<3>, _context: &Context) -> Tensor<3> {
        let h = relu(self.up_proj.forward(x));
        self.down_proj.forward(h.clone() * h)
    }
}

/// Two of these layers: one expert that every token uses, and one that none uses.
#[derive(Module, Debug)]
struct TwoExperts {
    chosen: SquaredRelu,
    idle: SquaredRelu,
}

impl Layer for TwoExperts {
    fn forward(&self, x: Tensor<3>, context: &Context) -> Tensor<3> {
        self.chosen.forward(x, context)
    }

    fn active_parameters(&self) -> usize {
        self.chosen.active_parameters()
    }
}

const STEPS: u64 = 6;

/// Less than every gradient norm of the run, so that every step is clipped.
const GRAD_CLIP: f64 = 0.01;

/// Trains the decoder with the new layer; the run folder is named after the settings.
fn train(workspace: &Workspace, out: &str, changes: &[(&str, &str)], resume: Option<&str>) -> Summary {
    let data = format!("'{}'", workspace.path("data").display());
    let (steps, clip) = (STEPS.to_string(), GRAD_CLIP.to_string());
    let common = [
        ("data.path", data.as_str()),
        ("model.feed_forward", "'my_squared_relu'"),
        ("train.steps", &steps),
        ("train.micro_batch", "1"),
        ("model.dropout", "0.1"),
        // Larger than usual, so that the layer's gradients are not negligible compared with the others.
        ("model.init_std", "0.1"),
        ("optim.grad_clip", &clip),
        ("checkpoint.every", "1"),
        ("checkpoint.format", "'full'"),
    ];
    let config = workspace.config("extension.toml", &[&common, changes].concat());
    let options = RunOptions {
        out: workspace.path(out).into(),
        resume: resume.map(|path| Resume::Path(workspace.path(path))),
        registry: Registry::default().layer("my_squared_relu", |init| Ok(SquaredRelu::new(init))),
        ..RunOptions::default()
    };
    kiln::run::train(config, &options).unwrap_or_else(|error| panic!("{out}: {error}"))
}

/// Returns all tensors of one kind of file of a checkpoint, as names, shapes and values.
fn tensors(folder: &Path, kind: &str) -> Vec<(String, Vec<usize>, Vec<f32>)> {
    let mut all = Vec::new();
    for name in crate::support::names(folder) {
        if !name.starts_with(kind) || !name.ends_with(".safetensors") {
            continue;
        }
        let bytes = std::fs::read(folder.join(name)).expect("a file");
        for (name, view) in SafeTensors::deserialize(&bytes).expect("tensors").tensors() {
            let values = view.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
            all.push((name, view.shape().to_vec(), values));
        }
    }
    all.sort_by(|(a, ..), (b, ..)| a.cmp(b));
    all
}

#[test]
fn a_layer_from_outside_trains_under_every_strategy() {
    let workspace = Workspace::new();
    let alone = [("train.ranks", "1"), ("shard.strategy", "'NO_SHARD'")];
    train(&workspace, "alone", &alone, None);
    let reference = workspace.steps("alone");
    assert_eq!(reference.len() as u64, STEPS);
    assert!(reference[5].1 < reference[0].1, "it learns: {reference:?}");

    for (strategy, recompute) in [
        ("FULL_SHARD", "block"),
        ("SHARD_GRAD_OP", "none"),
        ("NO_SHARD", "none"),
        ("HYBRID_SHARD", "none"),
        ("HYBRID_SHARD_GRAD_OP", "block"),
    ] {
        let quoted = [strategy, recompute].map(|value| format!("'{value}'"));
        let mut changes = vec![
            ("train.ranks", "4"),
            ("shard.strategy", quoted[0].as_str()),
            ("shard.recompute", quoted[1].as_str()),
        ];
        if strategy.starts_with("HYBRID") {
            changes.push(("shard.shard_size", "2"));
        }
        let summary = train(&workspace, strategy, &changes, None);
        let steps = workspace.steps(strategy);
        assert_same_curve(strategy, &steps, &reference, 1e-5);
        assert_eq!(summary.loss, Some(steps[5].1));

        // A run resumed from the middle has the same bits.
        let middle = format!("{strategy}/checkpoints/fsdp_cpt3");
        let resumed = format!("{strategy}_resumed");
        train(&workspace, &resumed, &changes, Some(&middle));
        assert_same_curve(&resumed, &workspace.steps(&resumed), &steps[3..], 0.0);
        let end = |out: &str| tensors(&workspace.path(out).join("checkpoints/fsdp_cpt6"), "");
        assert!(end(&resumed) == end(strategy), "{resumed}: weights and moments");
    }
}

#[test]
fn its_parameters_are_counted_saved_and_clipped() {
    let workspace = Workspace::new();
    train(&workspace, "run", &[], None);
    let folder = |step: u64| workspace.path(format!("run/checkpoints/fsdp_cpt{step}"));

    // d_model 16, d_ff 32, 4 heads of 4, 2 of them for keys and values, 2 layers, tied.
    let (d, ff, kv) = (16, 32, 8);
    let block = 2 * d * d + 2 * d * kv + 2 * d * ff + 2 * d;
    let weights = tensors(&folder(STEPS), "model");
    let count: usize = weights.iter().map(|(_, _, values)| values.len()).sum();
    assert_eq!(count, VOCAB * d + 2 * block + d);
    for layer in 0..2 {
        for (name, shape) in [("up_proj", [d, ff]), ("down_proj", [ff, d])] {
            let name = format!("layers.{layer}.ffn.{name}.weight");
            let found = weights.iter().find(|(found, ..)| *found == name);
            assert_eq!(found.map(|(_, shape, _)| shape.as_slice()), Some(&shape[..]), "{name}");
        }
    }

    // After the first step the first moment is (1 - beta1) times the clipped gradient.
    let (_, _, norm) = workspace.steps("run")[0];
    assert!(norm > GRAD_CLIP, "{norm}");
    let moments = tensors(&folder(1), "optimizer");
    let squares = moments
        .iter()
        .filter(|(name, ..)| name.ends_with(".exp_avg"))
        .flat_map(|(_, _, values)| values)
        .map(|value| f64::from(*value).powi(2));
    let clipped = squares.sum::<f64>().sqrt() / (1.0 - 0.9);
    assert!((clipped - GRAD_CLIP).abs() <= 1e-4 * GRAD_CLIP, "{clipped}");
}

/// `mfu` counts only parameters by which a token is multiplied.
#[test]
fn experts_that_a_token_does_not_meet_make_no_mfu() {
    let workspace = Workspace::new();
    let data = format!("'{}'", workspace.path("data").display());
    let changes = [("data.path", data.as_str()), ("model.feed_forward", "'two_experts'")];
    let config = workspace.config("experts.toml", &changes);
    let registry = Registry::default().layer("two_experts", |init| {
        let expert = |name| SquaredRelu::new(init.fork(name));
        Ok(TwoExperts { chosen: expert("chosen"), idle: expert("idle") })
    });
    let options = RunOptions { out: workspace.path("run").into(), registry, ..RunOptions::default() };
    kiln::run::train(config, &options).expect("a run");
    // As in the test above, with attention over 8 tokens and the tied embedding as the head's matrix.
    let (d, ff, kv) = (16, 32, 8);
    let block = 2 * d * d + 2 * d * kv + 2 * d * ff + 2 * d;
    let per_token = 6 * (VOCAB * d + 2 * block + d) + 12 * 2 * d * 8;
    for step in workspace.metrics("run").iter().filter(|line| line.get("loss").is_some()) {
        let number = |key: &str| step[key].as_f64().expect("a number");
        // The configuration has a peak of 1 TFLOP/s.
        let flops = number("mfu") * 1e12 / number("tokens_per_s");
        assert!((flops / per_token as f64 - 1.0).abs() < 1e-9, "{flops} and {per_token}");
    }
}
