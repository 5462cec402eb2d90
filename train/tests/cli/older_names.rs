//! Checkpoints of older builds, in which the names of parameters had the arms of Rust enums. The fixture is from
//! a run of four steps of the last such build, after the second step.

use std::fs;
use std::path::Path;

use kiln::checkpoint::FORMAT_VERSION;
use serde_json::Value as Json;

use crate::support::{Workspace, assert_same_curve, names};

/// The last steps of the run that wrote the fixture.
const LAST_STEPS: [(u64, f64, f64); 2] =
    [(3, 5.428557872772217, 1.2239879531500588), (4, 5.342297554016113, 1.1708744672770586)];

fn workspace() -> Workspace {
    let workspace = Workspace::new();
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/checkpoint_version_3");
    for name in names(&fixture) {
        workspace.write(&format!("old/{name}"), fs::read(fixture.join(&name)).expect("a file"));
    }
    let sizes = [("d_model", "8"), ("layers", "1"), ("heads", "2"), ("kv_heads", "1"), ("d_ff", "16")];
    let sizes = sizes.map(|(key, value)| (format!("model.{key}"), value));
    let changes: Vec<_> = sizes.iter().map(|(key, value)| (key.as_str(), *value)).collect();
    workspace.config("run.toml", &changes);
    workspace
}

/// Name, kind and pieces of everything that a checkpoint holds.
fn tensors(workspace: &Workspace, checkpoint: &str) -> Vec<[Json; 3]> {
    let manifest = workspace.json(format!("{checkpoint}/manifest.json"));
    let tensors = manifest["tensors"].as_array().expect("a list");
    tensors.iter().map(|t| ["name", "saved", "pieces"].map(|key| t[key].clone())).collect()
}

#[test]
fn a_checkpoint_with_older_names_resumes_bit_for_bit() {
    let workspace = workspace();
    workspace.succeed(&["convert", "--checkpoint", "old", "--out", "new", "--ranks", "2"]);
    assert_eq!(workspace.json("new/manifest.json")["format_version"], FORMAT_VERSION);
    // The same bytes of weights and moments, by their checksums, under names without arms.
    let mut expected = tensors(&workspace, "old");
    for [name, ..] in &mut expected {
        *name = name.as_str().expect("a name").replace("ffn.SwiGlu.", "ffn.").into();
    }
    assert_eq!(tensors(&workspace, "new"), expected);
    assert_ne!(tensors(&workspace, "old"), expected, "the fixture has arms");

    for from in ["old", "new"] {
        let out = format!("resumed-{from}");
        let said = workspace.succeed(&["train", "run.toml", "--out", &out, "--resume", from]);
        // As that build added gradients up.
        assert!(said.contains("FULL_SHARD, recompute none, accumulate unsharded\n"), "{said}");
        // Processors differ in the last bits.
        assert_same_curve(from, &workspace.steps(&out), &LAST_STEPS, 1e-5);
    }
    assert_eq!(workspace.steps("resumed-old"), workspace.steps("resumed-new"));
}

#[test]
fn a_checkpoint_with_older_names_is_read_by_every_command() {
    let workspace = workspace();
    workspace.succeed(&["convert", "--checkpoint", "old", "--out", "new"]);
    let said = workspace.succeed(&["inspect", "old"]);
    assert!(said.contains("layers.0.ffn.gate_proj.weight"), "{said}");
    let said = workspace.succeed(&["inspect", "old", "--verify"]);
    assert!(said.contains("every checksum is right"), "{said}");
    let same = |arguments: &[&str]| {
        let [old, new] = ["old", "new"].map(|checkpoint| {
            let arguments: Vec<_> =
                arguments.iter().map(|a| if *a == "FROM" { checkpoint } else { *a }).collect();
            workspace.succeed(&arguments)
        });
        assert_eq!(old, new, "{arguments:?}");
    };
    same(&["eval", "--checkpoint", "FROM", "--data", "data", "--json"]);
    same(&["generate", "--checkpoint", "FROM", "--prompt", "a", "--max-tokens", "4"]);
    for from in ["old", "new"] {
        let (out, init) = (format!("from-{from}"), format!("init.from={from}"));
        workspace.succeed(&["train", "run.toml", "--out", &out, "--set", &init]);
        workspace.succeed(&["export", "--checkpoint", from, "--out", &format!("hf-{from}")]);
    }
    assert_eq!(workspace.steps("from-old"), workspace.steps("from-new"));
    let exported = |from: &str| workspace.read(format!("hf-{from}/model.safetensors"));
    assert_eq!(exported("old"), exported("new"));
}
