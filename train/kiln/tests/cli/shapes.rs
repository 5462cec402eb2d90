//! Models with the shapes of Llama and Qwen: from a configuration to text.

use kiln::config::{self, Config};
use kiln_model::{AttentionBias, RopeScaling};

use crate::support::Workspace;

const LLAMA3: &str =
    "{ kind = 'llama3', factor = 8, low_freq_factor = 1.0, high_freq_factor = 4.0, original_context = 8 }";

fn changes() -> [(&'static str, &'static str); 6] {
    [
        ("model.head_dim", "6"),
        ("model.attention_bias", "'qkv'"),
        ("model.feed_forward_bias", "true"),
        ("model.qk_norm", "true"),
        ("model.rope_theta", "500000.0"),
        ("model.rope_scaling", LLAMA3),
    ]
}

fn llama3() -> RopeScaling {
    RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 8 }
}

#[test]
fn a_configuration_goes_through_a_file_and_back() {
    let workspace = Workspace::new();
    for (scaling, expected) in
        [(LLAMA3, llama3()), ("{ kind = 'linear', factor = 2.5 }", RopeScaling::Linear { factor: 2.5 })]
    {
        let written = workspace.config("a.toml", &[("model.rope_scaling", scaling)]);
        assert_eq!(written.model.rope_scaling, Some(expected));
        let text = toml::to_string(&written).expect("TOML");
        assert_eq!(toml::from_str::<Config>(&text).expect("a configuration"), written, "{text}");
        // The same scaling, set on the command line.
        let set = format!("model.rope_scaling={scaling}");
        let loaded = config::load(&workspace.path("run.toml"), &[set]).expect("a configuration");
        assert_eq!(loaded.model, written.model);
    }
}

#[test]
fn a_model_of_another_shape_trains_resumes_and_speaks() {
    let workspace = Workspace::new();
    let saved = [("checkpoint.every", "2"), ("checkpoint.format", "'full'")];
    let config = workspace.config("run.toml", &[&changes()[..], &saved].concat());
    assert_eq!(config.model.attention_bias, Some(AttentionBias::Qkv));
    workspace.succeed(&["train", "run.toml", "--out", "run"]);
    // The configuration that the run has written describes the same model.
    let copy = workspace.path("run/checkpoints/fsdp_cpt4/config.toml");
    let model = config::load(&copy, &[]).expect("a configuration").model;
    assert_eq!(model.resolve(None), config.model.resolve(Some(crate::support::VOCAB)));
    assert_eq!(model.rope_scaling, Some(llama3()));
    let index = workspace.json("run/checkpoints/fsdp_cpt4/model.safetensors.index.json");
    for name in ["attention.q_norm.weight", "attention.k_proj.bias", "ffn.down_proj.bias"] {
        let name = format!("layers.1.{name}");
        assert!(index["weight_map"].get(&name).is_some(), "{name}: {index}");
    }
    // A run resumed from the middle ends like the whole run.
    let resume = ["--resume", "run/checkpoints/fsdp_cpt2", "--out", "resumed"];
    workspace.succeed(&[&["train", "run.toml"], &resume[..]].concat());
    assert_eq!(workspace.losses("resumed"), workspace.losses("run")[2..]);
    let generate = ["--prompt", "abc", "--max-tokens", "12", "--temperature", "0"];
    let text = |run: &str| workspace.succeed(&[&["generate", "--checkpoint", run], &generate[..]].concat());
    assert_eq!(text("run"), text("resumed"));
    assert!(text("run").starts_with("abc"));
}
