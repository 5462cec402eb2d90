//! `[lora]`: low-rank adapters on a model, from its checkpoint to PEFT's layout and back.

use crate::support::{RUN, Workspace, weights};

/// Returns a workspace with `base`, a trained model, and `lora.toml`, which adapts it.
fn workspace() -> Workspace {
    let workspace = Workspace::new();
    workspace.succeed(&["train", "run.toml", "--out", "base"]);
    let (_, rest) = RUN.split_once("[data]").expect("a section");
    let lora = "[init]\nfrom = \"base\"\n\n[lora]\nrank = 2\nalpha = 8\n";
    workspace.write("lora.toml", format!("{lora}\n[data]{rest}"));
    workspace
}

fn train(workspace: &Workspace, out: &str, more: &[&str]) -> Vec<(u64, f64, f64)> {
    workspace.succeed(&[&["train", "lora.toml", "--out", out][..], more].concat());
    workspace.steps(out)
}

/// Returns the validation loss that `kiln eval` prints for `model`.
fn evaluated(workspace: &Workspace, model: &str) -> f64 {
    let printed = workspace.succeed(&["eval", model, "--data", "data", "--samples", "8", "--seq-len", "8"]);
    let (_, loss) = printed.split_once("validation loss ").expect("a loss");
    loss.split(' ').next().and_then(|loss| loss.parse().ok()).expect("a number")
}

#[test]
fn only_adapters_change() {
    let workspace = workspace();
    let first = train(&workspace, "still", &["--set", "optim.lr=0.0", "--set", "train.steps=1"]);
    workspace.succeed(&[
        "train",
        "run.toml",
        "--out",
        "more",
        "--set",
        "init.from=base",
        "--set",
        "train.steps=1",
    ]);
    assert_eq!(first[0].1, workspace.losses("more")[0], "new adapters add nothing");

    let dropout = ["--set", "lora.dropout=0.5"];
    for settings in [&[][..], &dropout] {
        let run = |out: &str, more: &[&str]| {
            let steps = train(&workspace, out, &[settings, more].concat());
            let found = weights(&workspace, out);
            (steps, found)
        };
        let full = run("full", &["--set", "checkpoint.every=2"]);
        for strategy in ["NO_SHARD", "FULL_SHARD"] {
            for recompute in ["none", "selective", "block"] {
                let (strategy, recompute) =
                    (format!("shard.strategy={strategy}"), format!("shard.recompute={recompute}"));
                let more = ["--set", &strategy, "--set", &recompute, "--set", "shard.accumulate=sharded"];
                assert_eq!(run("other", &more), full, "{more:?}");
                workspace.remove("other");
            }
        }
        let resumed = run("resumed", &["--resume", "full/checkpoints/fsdp_cpt2"]);
        assert_eq!((&resumed.0[..], &resumed.1), (&full.0[2..], &full.1));

        let base = weights(&workspace, "base");
        for (name, values) in &full.1 {
            match base.get(name) {
                Some(of_base) => assert_eq!(values, of_base, "{name}"),
                None => assert!(name.contains(".lora."), "{name}"),
            }
        }
        // `A` and `B` of seven maps in each of two blocks.
        assert_eq!(full.1.len(), base.len() + 28);
        for run in ["full", "resumed"] {
            workspace.remove(run);
        }
    }
}

#[test]
fn adapters_leave_and_return() {
    let workspace = workspace();
    train(&workspace, "run", &["--set", "lora.targets=['q_proj', 'layers.1.ffn.*']"]);
    let before = workspace.tree();
    workspace.succeed(&["export", "run", "--out", "adapters"]);
    workspace.succeed(&["export", "run", "--out", "merged", "--merge"]);
    let config = workspace.json("adapters/adapter_config.json");
    let targets = [
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.mlp.down_proj",
        "model.layers.1.mlp.gate_proj",
        "model.layers.1.mlp.up_proj",
        "model.layers.1.self_attn.q_proj",
    ];
    assert_eq!(config["target_modules"], serde_json::json!(targets));
    assert_eq!((&config["r"], &config["lora_alpha"]), (&2.into(), &8.0.into()));
    assert_eq!(weights(&workspace, "adapters"), weights(&workspace, "run"));
    let losses = ["run", "adapters", "merged"].map(|model| evaluated(&workspace, model));
    assert_eq!(losses[0], losses[1]);
    assert!((losses[0] / losses[2] - 1.0).abs() < 1e-4, "{losses:?}");

    // Training continues from the exported adapters as from the checkpoint, without the optimizer's state.
    let targets = ["--set", "lora.targets=['layers.1.ffn.*', 'q_proj']"];
    let from = |folder: &str, out: &str| {
        let from = format!("init.from={folder}");
        train(&workspace, out, &[&targets[..], &["--set", &from]].concat())
    };
    assert_eq!(from("adapters", "a"), from("run", "b"));
    for (path, content) in before {
        assert_eq!(workspace.tree().get(&path), Some(&content), "{}", path.display());
    }
}

#[test]
fn wrong_adapters_are_refused() {
    let workspace = workspace();
    train(&workspace, "run", &[]);
    workspace.succeed(&["export", "run", "--out", "adapters"]);
    let refused = |arguments: &[&str], expected: &str| {
        let ended = workspace.kiln(arguments);
        assert!(ended.code != Some(0) && ended.stderr.contains(expected), "{arguments:?}: {ended:?}");
    };
    let start = ["train", "lora.toml", "--out", "new"];
    let with = |more: &[&'static str]| [&start[..], more].concat();
    refused(&with(&["--set", "lora.targets=['q_proj', 'w_proj']"]), "\"w_proj\" selects no map");
    refused(&with(&["--set", "lora.targets=[]"]), "lora.targets = []: must be names or patterns");
    refused(&with(&["--set", "lora.targets=['*.[a']"]), "lora.targets = \"*.[a\": must be a valid pattern");
    refused(&with(&["--set", "lora.rank=0"]), "lora.rank = 0");
    refused(&with(&["--set", "lora.alpha=-1.0"]), "lora.alpha = -1: must be positive");
    refused(&with(&["--set", "train.freeze=['embed']"]), "[lora] trains the adapters");
    refused(&with(&["--set", "init.from=run", "--set", "lora.rank=3"]), "model.lora is");
    refused(&["train", "run.toml", "--out", "new", "--set", "lora.rank=2"], "init.from");
    refused(&["train", "run.toml", "--out", "new", "--set", "init.from=run"], "export --merge");
    refused(&["export", "base", "--out", "new", "--merge"], "has no adapters to merge");
    assert!(!workspace.path("new").exists());

    let changed = |from: &str, to: &str, expected: &str| {
        workspace.remove("changed");
        workspace.copy("adapters", "changed");
        workspace.replace("changed/adapter_config.json", from, to);
        refused(&["eval", "changed", "--data", "data"], expected);
    };
    std::fs::create_dir(workspace.path("changed")).expect("a folder");
    changed("\"LORA\"", "\"LOHA\"", "peft_type = \"LOHA\" is not supported");
    changed("\"use_dora\": false", "\"use_dora\": true", "use_dora = true is not supported");
    changed("\"r\": 2", "\"r\": 3", "expected");
    changed("\"r\": 2", "\"rank_pattern\": {\"q_proj\": 4}, \"r\": 2", "rank_pattern");
    changed("\"base_model_name_or_path\": \"", "\"base_model_name_or_path\": \"none/", "not a folder here");
    workspace.write("changed/adapter_model.safetensors", "");
    workspace.replace("changed/adapter_config.json", "none/", "");
    refused(&["eval", "changed", "--data", "data"], "adapter_model.safetensors");
}

/// Checkpoints contain only the adapters, and name the model that they change.
#[test]
fn checkpoints_need_their_model() {
    let workspace = workspace();
    let full = train(&workspace, "run", &["--set", "checkpoint.every=2"]);
    let weight_files = |checkpoint: &str| {
        let files = workspace.json(format!("{checkpoint}/manifest.json"))["files"].clone();
        let files = files.as_object().expect("files").clone().into_iter();
        files
            .filter(|(name, _)| name.starts_with("model-"))
            .map(|(_, file)| file["bytes"].as_u64().unwrap())
            .sum()
    };
    let [small, whole]: [u64; 2] =
        ["run/checkpoints/fsdp_cpt4", "base/checkpoints/fsdp_cpt4"].map(weight_files);
    assert!(small < whole / 2, "{small} and {whole} bytes");
    let single = ["--to", "full", "--out", "single"];
    workspace.succeed(&[&["convert", "run"][..], &single].concat());
    assert_eq!(weights(&workspace, "single"), weights(&workspace, "run"));

    let resume = ["train", "lora.toml", "--out", "on", "--resume", "run/checkpoints/fsdp_cpt2"];
    let refused = |arguments: &[&str], expected: &str| {
        let ended = workspace.kiln(arguments);
        assert!(ended.code != Some(0) && ended.stderr.contains(expected), "{arguments:?}: {ended:?}");
    };
    std::fs::rename(workspace.path("base"), workspace.path("moved")).expect("a folder");
    for arguments in [&resume[..], &["eval", "run"], &["export", "run", "--out", "x", "--merge"]] {
        refused(arguments, "which no longer exists: put that model back");
    }
    workspace.succeed(&[&resume[..], &["--set", "init.from=moved"]].concat());
    assert_eq!(workspace.steps("on"), full[2..]);
    // Another model of the same shape.
    workspace.succeed(&["train", "run.toml", "--out", "base", "--set", "train.seed=5"]);
    refused(&["eval", "run"], "has other weights now");
    workspace.remove("base");
    workspace.succeed(&["train", "run.toml", "--out", "base", "--set", "model.d_ff=48"]);
    refused(&["eval", "run"], "is another model now (model.d_ff is 48 there and 32 here)");
}
