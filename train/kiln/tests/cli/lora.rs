//! Your own program, `train/kiln/examples/lora.rs`: a block around the layers that the configuration names, which
//! trains only its adapters, from a checkpoint of `kiln`.

use crate::support::{Ended, RUN, Workspace, example, weights};

/// Returns a workspace with `base`, a trained model, and `lora.toml`, whose section `[model]` says only what differs
/// from it.
fn workspace() -> Workspace {
    let workspace = Workspace::new();
    workspace.succeed(&["train", "run.toml", "--out", "base"]);
    let (_, rest) = RUN.split_once("[data]").expect("a section");
    let rest = rest.replace("steps = 4\n", "steps = 4\ntrain_only = [\"*.lora_*\"]\n");
    let model = "[model]\nblock = \"lora\"\n\n[model.extra.lora]\nrank = 2\nalpha = 4.0";
    workspace.write("lora.toml", format!("[init]\nfrom = \"base\"\n\n{model}\n\n[data]{rest}"));
    workspace
}

fn lora(workspace: &Workspace, arguments: &[&str]) -> Ended {
    workspace.run(&example("lora"), arguments)
}

const START: [&str; 3] = ["--allow-other-parts", "--allow-missing", "*.lora_*"];

fn train(workspace: &Workspace, out: &str, more: &[&str]) -> Vec<(u64, f64, f64)> {
    let ended = lora(workspace, &[&["train", "lora.toml", "--out", out], more].concat());
    assert_eq!(ended.code, Some(0), "{ended:?}");
    workspace.steps(out)
}

#[test]
fn adapters_start_as_the_base_model() {
    let workspace = workspace();
    let still = ["--set", "optim.lr=0.0", "--set", "train.steps=1"];
    let first = train(&workspace, "still", &[&START[..], &still].concat());
    assert_eq!(workspace.val_loss("still"), workspace.val_loss("base"));
    let stock = ["--set", "init.from=base", "--set", "train.steps=1"];
    workspace.succeed(&[&["train", "run.toml", "--out", "more"][..], &stock].concat());
    assert_eq!(first[0].1, workspace.losses("more")[0]);
}

#[test]
fn only_adapters_are_trained() {
    let workspace = workspace();
    let start = |more: &[&'static str]| [&START[..], more].concat();
    let full = train(&workspace, "full", &start(&["--set", "checkpoint.every=2"]));
    let none = ["--set", "shard.strategy=NO_SHARD", "--set", "shard.accumulate=sharded"];
    assert_eq!(train(&workspace, "none", &start(&none)), full);
    let block = ["--set", "shard.recompute=block"];
    assert_eq!(train(&workspace, "block", &start(&block)), full);
    assert_eq!(train(&workspace, "none-block", &start(&[&none[..], &block].concat())), full);
    // A resumed run needs no permission: the checkpoint has the adapters.
    assert_eq!(train(&workspace, "resumed", &["--resume", "full/checkpoints/fsdp_cpt2"]), full[2..]);

    // Adapters and norms are trained: the checkpoint has no moments of the norms.
    let wider = ["train", "lora.toml", "--out", "wider", "--resume", "full/checkpoints/fsdp_cpt2"];
    let only = ["--set", "train.train_only=['*.lora_*', '*_norm.*']"];
    let said = lora(&workspace, &[&wider[..], &only].concat());
    assert_eq!(said.code, Some(2), "{said:?}");
    let says = "_norm.weight: these parameters were frozen. Use train.freeze and train.train_only";
    assert!(said.stderr.contains(says) && !said.stderr.contains("lora_a"), "{said:?}");

    let (base, middle) = (weights(&workspace, "base"), weights(&workspace, "full/checkpoints/fsdp_cpt2"));
    let trained = weights(&workspace, "full");
    assert_eq!(trained, weights(&workspace, "none-block"));
    for (name, values) in &trained {
        match base.get(name) {
            Some(of_base) => assert_eq!(values, of_base, "{name}"),
            None => assert!(name.contains(".lora_") && values != &middle[name], "{name}"),
        }
    }
    // `A` and `B` of two layers in each of two blocks.
    assert_eq!(trained.len(), base.len() + 8);
    assert!(trained.contains_key("layers.1.attention.lora_b.weight"), "{:?}", trained.keys());

    let said = lora(&workspace, &["generate", "full", "--prompt", "a", "--max-tokens", "4"]);
    assert_eq!(said.code, Some(0), "{said:?}");
    let said = workspace.kiln(&["eval", "--checkpoint", "full"]);
    assert!(said.stderr.contains("was trained with block `lora`"), "{said:?}");
}

#[test]
fn mistakes_are_named() {
    let workspace = workspace();
    let refused = |more: &[&str], expected: &str| {
        let arguments = [&["train", "lora.toml", "--out", "run"], &START[..], more].concat();
        let said = lora(&workspace, &arguments);
        assert!(said.code == Some(2) && said.stderr.contains(expected), "{more:?}: {said:?}");
        assert!(!workspace.path("run").exists(), "nothing was begun");
    };
    refused(
        &["--set", "model.extra.lora.rank='two'"],
        "model.extra.lora.rank: invalid type: string \"two\", expected a nonzero u32 (layers.0)",
    );
    refused(&["--set", "model.extra.lora.ranks=2"], "model.extra.lora.ranks: unknown field `ranks`");
    refused(
        &["--set", "model.extra.lara.rank=2"],
        "model.extra.lara: not a table of a part of this model, `lora`, `full`, `swiglu`",
    );
    refused(
        &["--set", "train.train_only=['*.lora_c.*']"],
        "train.train_only: no parameter matches \"*.lora_c.*\"; similar names are ",
    );
    refused(&["--set", "train.freeze=['embed']"], "train.freeze and train.train_only are both set");
    refused(&["--set", "model.d_ff=48"], "model.d_ff is 32 there and 48 here");
    refused(&["--set", "model.feed_forward=geglu"], "model.feed_forward is swiglu there and geglu here");
}

/// The shape of the model is that of its initial weights.
#[test]
fn a_checkpoint_gives_the_shape() {
    let workspace = workspace();
    let (_, rest) = RUN.split_once("[data]").expect("a section");
    workspace.write("shaped.toml", format!("[init]\nfrom = \"base\"\n\n[model]\n\n[data]{rest}"));
    workspace.succeed(&["train", "shaped.toml", "--out", "shaped"]);
    assert_eq!(workspace.steps("shaped").len(), 4);
    let model = |out: &str| workspace.state(&format!("{out}/checkpoints/fsdp_cpt4"))["model"].clone();
    assert_eq!(model("shaped"), model("base"));
    let said = workspace.kiln(&["train", "shaped.toml", "--out", "run", "--set", "model.heads=2"]);
    assert!(said.code == Some(2) && said.stderr.contains("model.heads is 4 there and 2 here"), "{said:?}");
}
