//! A model with experts goes through the commands.

use crate::support::{Workspace, assert_same_curve};

const EXPERTS: &str = "{ experts = 4, experts_per_token = 2, expert_d_ff = 12, router_aux_loss_coef = 0.01 }";

/// A folder whose `moe.toml` trains a model with experts for eight steps, as Qwen3-MoE has them.
fn workspace() -> Workspace {
    let workspace = Workspace::new();
    let changes = [
        ("model.feed_forward", "'moe'"),
        ("model.moe", EXPERTS),
        ("model.qk_norm", "true"),
        ("train.steps", "8"),
        ("checkpoint.every", "4"),
    ];
    workspace.config("moe.toml", &changes);
    workspace
}

#[test]
fn a_run_that_was_interrupted_has_the_same_bits() {
    let workspace = workspace();
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
    let workspace = workspace();
    let steps = |strategy: &str, recompute: &str| {
        let settings = [format!("shard.strategy={strategy}"), format!("shard.recompute={recompute}")];
        let out = format!("{strategy}-{recompute}");
        let arguments = ["train", "moe.toml", "--out", &out, "--set", &settings[0], "--set", &settings[1]];
        workspace.succeed(&arguments);
        workspace.steps(&out)
    };
    let first = steps("FULL_SHARD", "none");
    for (strategy, recompute) in [("FULL_SHARD", "block"), ("SHARD_GRAD_OP", "none"), ("NO_SHARD", "none")] {
        assert_same_curve(strategy, &steps(strategy, recompute), &first, 0.0);
    }
}

/// Evaluation, generation, inspection and the layout of Hugging Face.
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

#[test]
fn experts_that_cannot_be_are_refused() {
    let workspace = workspace();
    for (setting, message) in [
        ("model.moe.experts_per_token=5", "model.moe.experts_per_token = 5: must be at most 4"),
        ("model.feed_forward=swiglu", "[model.moe] is there, and model.feed_forward is \"swiglu\""),
        ("model.moe.capacity=2", "unknown key `capacity`"),
    ] {
        let ended = workspace.kiln(&["train", "moe.toml", "--out", "run", "--set", setting]);
        assert_eq!(ended.code, Some(2), "{ended:?}");
        assert!(ended.stderr.contains(message), "{}", ended.stderr);
    }
}
