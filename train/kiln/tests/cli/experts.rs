//! Every command on a model with experts.

use serde_json::Value as Json;

use crate::support::{Workspace, assert_same_curve};

const EXPERTS: &str = "{ experts = 4, experts_per_token = 2, expert_d_ff = 12, router_aux_loss_coef = 0.01 }";

/// Returns a workspace whose `moe.toml` trains a model with experts like those of Qwen3-MoE for eight steps.
fn workspace() -> Workspace {
    with(EXPERTS)
}

/// Returns the same workspace, but biases balance the experts, and move fast enough to have an effect.
fn with_biases() -> Workspace {
    with(&format!("{}, expert_bias = true }}", EXPERTS.trim_end_matches(" }")))
}

fn with(experts: &str) -> Workspace {
    let workspace = Workspace::new();
    let changes = [
        ("model.feed_forward", "'moe'"),
        ("model.moe", experts),
        ("model.qk_norm", "true"),
        ("train.steps", "8"),
        ("checkpoint.every", "4"),
        ("optim.expert_bias_lr", "0.03"),
    ];
    workspace.config("moe.toml", &changes);
    workspace
}

#[test]
fn a_run_that_was_interrupted_has_the_same_bits() {
    [workspace(), with_biases()].iter().for_each(interrupted_run_has_the_same_bits);
}

fn interrupted_run_has_the_same_bits(workspace: &Workspace) {
    workspace.succeed(&["train", "moe.toml", "--out", "straight"]);
    let from = "straight/checkpoints/fsdp_cpt4";
    workspace.succeed(&["train", "moe.toml", "--out", "resumed", "--resume", from]);
    let (straight, resumed) = (workspace.steps("straight"), workspace.steps("resumed"));
    assert_eq!((straight.len(), resumed.len()), (8, 4));
    assert_same_curve("resumed", &resumed, &straight[4..], 0.0);
    let end = |out: &str| {
        let name = "model-part-00001-of-00002.safetensors";
        workspace.read(format!("{out}/checkpoints/fsdp_cpt8/{name}"))
    };
    assert!(end("straight") == end("resumed"), "weights differ");
    assert!(straight[7].1 < straight[0].1, "{straight:?}");
}

#[test]
fn strategies_have_the_same_bits() {
    [workspace(), with_biases()].iter().for_each(strategies_have_bits);
}

fn strategies_have_bits(workspace: &Workspace) {
    let steps = |strategy: &str, recompute: &str| {
        let settings = [
            format!("shard.strategy={strategy}"),
            format!("shard.recompute={recompute}"),
            "shard.accumulate=sharded".to_owned(),
        ];
        let out = format!("{strategy}-{recompute}");
        let settings = settings.iter().flat_map(|setting| ["--set", setting]);
        let arguments = ["train", "moe.toml", "--out", &out];
        workspace.succeed(&arguments.into_iter().chain(settings).collect::<Vec<_>>());
        workspace.steps(&out)
    };
    let first = steps("FULL_SHARD", "none");
    for (strategy, recompute) in [("FULL_SHARD", "block"), ("SHARD_GRAD_OP", "none"), ("NO_SHARD", "none")] {
        assert_same_curve(strategy, &steps(strategy, recompute), &first, 0.0);
    }
}

/// Evaluation, generation, inspection and conversion to the layout of Hugging Face.
#[test]
fn every_command_knows_experts() {
    let workspace = workspace();
    workspace.succeed(&["train", "moe.toml", "--out", "run"]);
    let said = workspace.succeed(&["inspect", "run"]);
    assert!(said.contains("layers.0.ffn.experts.gate_proj"), "{said}");
    assert!(said.contains("4 experts of width 12, 2 per token"), "{said}");
    workspace.succeed(&["export", "--checkpoint", "run", "--out", "hf"]);
    assert_eq!(workspace.json("hf/config.json")["architectures"][0], "Qwen3MoeForCausalLM");
    workspace.succeed(&["import", "--hf", "hf", "--out", "back"]);
    let generate = |from: &str| {
        let options = ["--prompt", "abc", "--max-tokens", "12", "--temperature", "0"];
        workspace.succeed(&[&["generate", "--checkpoint", from], &options[..]].concat())
    };
    assert_eq!(generate("run"), generate("back"));
    let eval = |from: &str| {
        let text = workspace.succeed(&["eval", "--checkpoint", from, "--data", "data"]);
        text.lines().filter(|line| line.contains("loss")).map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(eval("run"), eval("hf"));
    assert!(!eval("run").is_empty());
}

/// Biases are saved, loaded, converted and used like any parameter; the layout of Hugging Face has none.
#[test]
fn every_command_knows_biases_of_experts() {
    let workspace = with_biases();
    workspace.succeed(&["train", "moe.toml", "--out", "run", "--set", "eval.samples=0"]);
    let said = workspace.succeed(&["inspect", "run"]);
    assert!(said.contains("layers.0.ffn.router_bias"), "{said}");
    assert!(said.contains("optimizer: adamw (state exp_avg, exp_avg_sq)"), "{said}");
    workspace.succeed(&["inspect", "run", "--verify"]);
    // Compares the values that the run computed with those computed from its checkpoint.
    let eval = |from: &str| workspace.succeed(&["eval", "--checkpoint", from, "--data", "data"]);
    let expected = format!("validation loss {:.4}", workspace.val_loss("run"));
    assert!(eval("run").contains(&expected), "{expected}: {}", eval("run"));
    let generate = |from: &str| {
        let options = ["--prompt", "abc", "--max-tokens", "12", "--temperature", "0"];
        workspace.succeed(&[&["generate", "--checkpoint", from], &options[..]].concat())
    };
    workspace.succeed(&["convert", "--checkpoint", "run", "--to", "full", "--out", "full"]);
    assert!(eval("full").contains(&expected));
    assert_eq!(generate("full"), generate("run"));
    let loads = |line: &Json| line["layers.0.ffn.largest_load"].as_f64();
    let metrics = workspace.metrics("run");
    assert!(metrics.iter().filter_map(loads).all(|load| (1.0..=2.0).contains(&load)));
    assert_eq!(metrics.iter().filter_map(loads).count(), 8);

    let refused = workspace.kiln(&["export", "--checkpoint", "run", "--out", "hf"]);
    assert_eq!(refused.code, Some(2), "{refused:?}");
    assert!(refused.stderr.contains("moe.expert_bias, which no supported architecture"), "{refused:?}");
    assert!(!workspace.path("hf").exists());
    // The model without biases is a different model.
    let arguments = ["train", "moe.toml", "--set", "model.moe.expert_bias=false", "--resume", "run"];
    let refused = workspace.kiln(&[&arguments[..], &["--out", "other"]].concat());
    assert_eq!(refused.code, Some(2), "{refused:?}");
    assert!(refused.stderr.contains("expert_bias"), "{refused:?}");
}

#[test]
fn experts_that_cannot_be_are_refused() {
    let workspace = with_biases();
    for (setting, message) in [
        ("optim.expert_bias_lr=-1.0", "optim.expert_bias_lr = -1: must be zero or more"),
        ("precision.compute=f16", "precision.compute = \"f16\" and model.moe.expert_bias = true"),
        ("model.moe.experts_per_token=5", "model.moe.experts_per_token = 5: must be at most 4"),
        ("model.feed_forward=swiglu", "[model.moe] is set, but model.feed_forward is \"swiglu\""),
        ("model.moe.capacity=2", "unknown key `capacity`"),
    ] {
        let ended = workspace.kiln(&["train", "moe.toml", "--out", "run", "--set", setting]);
        assert_eq!(ended.code, Some(2), "{ended:?}");
        assert!(ended.stderr.contains(message), "{}", ended.stderr);
    }
}
