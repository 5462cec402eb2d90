//! `kiln inspect` and `kiln convert`, and the weights that may be missing from a checkpoint.

use crate::hugging_face::copy_fixture;
use crate::messages::Messages;
use crate::support::{Workspace, names};

fn trained() -> Workspace {
    let workspace = Workspace::new();
    workspace.succeed(&["train", "run.toml", "--out", "run", "--set", "train.steps=2"]);
    workspace
}

/// The complete description, so that a reviewer sees every change.
#[test]
fn a_checkpoint_is_described() {
    let workspace = trained();
    let sharded = workspace.succeed(&["inspect", "run"]);
    workspace.succeed(&["convert", "--checkpoint", "run", "--out", "full"]);
    let full = workspace.succeed(&["inspect", "full"]);
    copy_fixture(&workspace, "qwen3", "hf");
    let hugging_face = workspace.succeed(&["inspect", "hf"]);
    insta::assert_snapshot!([sharded, full, hugging_face].join("\n"));
}

#[test]
fn verifying_names_every_file_that_is_damaged() {
    let workspace = trained();
    let said = workspace.succeed(&["inspect", "--verify", "run"]);
    assert!(said.starts_with("run/checkpoints/fsdp_cpt2 is intact: 6 files, "), "{said}");
    let folder = "run/checkpoints/fsdp_cpt2";
    for file in ["model-part-00001-of-00002", "optimizer-part-00002-of-00002"] {
        let path = format!("{folder}/{file}.safetensors");
        let mut bytes = workspace.read(&path);
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        workspace.write(&path, bytes);
    }
    let mut messages = Messages::default();
    messages.fails("two damaged files", &workspace, &["inspect", "--verify", "run"]);
    // Without reading every byte, `inspect` describes what the manifest says.
    workspace.succeed(&["inspect", "run"]);
    copy_fixture(&workspace, "llama_gqa", "hf");
    let said = workspace.succeed(&["inspect", "hf", "--verify"]);
    assert!(said.contains("has no checksums to compare"), "{said}");
    insta::assert_snapshot!(messages.finish());
}

#[test]
fn converted_there_and_back_is_the_same() {
    let workspace = trained();
    let convert = |from: &str, out: &str, more: &[&str]| {
        let arguments = ["convert", "--checkpoint", from, "--out", out];
        workspace.succeed(&[&arguments[..], more].concat())
    };
    let said = convert("run", "full", &[]);
    assert_eq!(said, "full is the full form of run/checkpoints/fsdp_cpt2 (sharded)\n");
    convert("full", "three", &["--ranks", "3"]);
    convert("three", "two", &["--to", "sharded", "--ranks", "2"]);
    let files = |folder: &str| names(&workspace.path(folder));
    assert_eq!(files("two"), files("run/checkpoints/fsdp_cpt2"));
    for file in files("two") {
        let there = workspace.read(format!("two/{file}"));
        assert!(there == workspace.read(format!("run/checkpoints/fsdp_cpt2/{file}")), "{file}");
    }
    assert_eq!(files("three").iter().filter(|name| name.starts_with("model-part")).count(), 3);
    // A run can resume from each of the converted checkpoints.
    workspace.succeed(&["train", "run.toml", "--out", "run", "--resume", "latest"]);
    for from in ["full", "three", "two"] {
        let out = format!("from_{from}");
        workspace.succeed(&["train", "run.toml", "--out", &out, "--resume", from]);
        assert_eq!(workspace.steps(&out), workspace.steps("run")[2..], "{from}");
    }
}

#[test]
fn what_cannot_be_looked_at_or_converted_is_refused() {
    let mut messages = Messages::default();
    let workspace = trained();
    let mut refused = |title: &str, arguments: &[&str]| {
        messages.refused(title, &workspace, arguments);
    };
    refused("nothing to inspect", &["inspect"]);
    refused("inspect what is not there", &["inspect", "none"]);
    let convert = ["convert", "--checkpoint", "run", "--out"];
    let with = |arguments: &[&'static str]| [&convert, arguments].concat();
    refused("convert to what is there", &with(&["data"]));
    refused("parts of a full one", &with(&["new", "--to", "full", "--ranks", "2"]));
    refused("how many parts", &with(&["new", "--to", "sharded"]));
    refused("no parts", &with(&["new", "--ranks", "0"]));
    refused("another format", &with(&["new", "--to", "zip"]));
    let train = ["train", "run.toml", "--out", "new", "--set", "init.from=run"];
    let untied = ["--set", "model.tie_embeddings=false"];
    let with = |arguments: &[&'static str]| [&train[..], &untied, arguments].concat();
    refused("an invalid pattern", &with(&["--allow-missing", "lm_head.[a"]));
    refused("keep what", &["train", "run.toml", "--set", "checkpoint.keep_every=-1"]);
    refused("which format", &["train", "run.toml", "--set", "checkpoint.format=zip"]);
    insta::assert_snapshot!(messages.finish());
}

#[test]
fn weights_may_be_missing_if_they_are_named() {
    let workspace = trained();
    let untied = ["--set", "model.tie_embeddings=false", "--set", "init.from=run"];
    let train = |out: &'static str, more: &[&'static str]| {
        let arguments = ["train", "run.toml", "--out", out];
        workspace.kiln(&[&arguments[..], &untied, more].concat())
    };
    let ended = train("new", &["--allow-missing", "lm_head.bias"]);
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(ended.stderr.contains("missing [lm_head.weight]"), "{ended:?}");
    let ended = train("new2", &["--allow-missing", "lm_head.*"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let kept = "not in the checkpoint, kept as initialised: lm_head.weight\n";
    assert!(ended.stdout.contains(kept), "{ended:?}");
    let said = workspace.succeed(&["inspect", "new2"]);
    assert!(said.contains("lm_head.weight"), "{said}");
    // The weights of an additional block also count as missing.
    let deeper = ["--set", "model.layers=3", "--allow-missing", "layers.2.*", "--allow-missing", "lm_head.*"];
    let ended = train("new3", &deeper);
    assert_eq!(ended.code, Some(0), "{ended:?}");
}

/// `--allow-missing` is only about missing weights: with these keys, existing weights would compute something else.
#[test]
fn missing_names_excuse_no_other_model() {
    let workspace = trained();
    for (key, value, told) in [
        ("rope_theta", "500000.0", "10000 there and 500000 here"),
        ("norm_eps", "1e-2", "0.00001 there and 0.01 here"),
        ("rope_scaling", "{ kind = 'linear', factor = 2.0 }", "none there and"),
        ("window", "4", "none there and 4 here"),
        ("logit_softcap", "30.0", "none there and 30 here"),
        ("feed_forward", "geglu", "swiglu there and geglu here"),
        ("heads", "2", "4 there and 2 here"),
    ] {
        let set = format!("model.{key}={value}");
        let allow = ["--allow-missing", "lm_head.*", "--set", "model.tie_embeddings=false"];
        let train = ["train", "run.toml", "--out", "new", "--set", &set];
        for from in [&["--set", "init.from=run"][..], &["--resume", "run"]] {
            let ended = workspace.kiln(&[&train[..], &allow, from].concat());
            assert_eq!(ended.code, Some(2), "{key}: {ended:?}");
            assert!(ended.stderr.contains(&format!("model.{key} is {told}")), "{key}: {ended:?}");
        }
    }
}

/// With initial weights, the configuration need not describe the model again.
#[test]
fn the_model_may_be_that_of_the_weights() {
    let workspace = Workspace::new();
    let first = ["train", "run.toml", "--out", "first", "--set", "train.steps=2"];
    workspace.succeed(&first);
    let config = workspace.text("run.toml");
    let (before, model) = config.split_once("[model]\n").expect("a model");
    let (_, after) = model.split_once("\n[").expect("another section");
    workspace.write("second.toml", format!("{before}[init]\nfrom = \"first\"\n\n[{after}"));
    workspace.succeed(&["train", "second.toml", "--out", "second", "--set", "optim.lr=0.0"]);
    let model =
        |out: &str, step: u64| workspace.state(&format!("{out}/checkpoints/fsdp_cpt{step}"))["model"].clone();
    assert_eq!(model("second", 4), model("first", 2));
    // The saved configuration, which starts the same run again, is complete.
    assert!(workspace.text("second/config.toml").contains("d_model = 16"));
}

/// The initial weights complete an incomplete section. Keys that are set must agree with the weights, unless they
/// are choices of a run.
#[test]
fn the_weights_complete_the_model() {
    let workspace = Workspace::new();
    let untied = ["--set", "model.tie_embeddings=false", "--set", "model.rope_theta=5e5"];
    workspace.succeed(&[&["train", "run.toml", "--out", "first"], &untied[..]].concat());
    let config = workspace.text("run.toml");
    let (before, model) = config.split_once("[model]\n").expect("a model");
    let (_, after) = model.split_once("\n[").expect("another section");
    let section = "[init]\nfrom = \"first\"\n\n[model]\nheads = 4\ndropout = 0.25\n\n[";
    workspace.write("second.toml", format!("{before}{section}{after}"));
    for command in ["check", "plan"] {
        workspace.succeed(&[command, "second.toml", "--ranks", "2"]);
    }
    workspace.succeed(&["train", "second.toml", "--out", "second"]);
    let model = |out: &str| workspace.state(&format!("{out}/checkpoints/fsdp_cpt4"))["model"].clone();
    let mut expected = model("first");
    expected["dropout"] = 0.25.into();
    assert_eq!(model("second"), expected);
    for (set, told) in [
        ("model.heads=2", "model.heads is 4 there and 2 here"),
        ("model.rope_theta=1e4", "model.rope_theta is 500000 there and 10000 here"),
        ("model.tie_embeddings=true", "model.tie_embeddings is false there and true here"),
        ("model.preset=10m", "model.d_model is 16 there and"),
    ] {
        let ended = workspace.kiln(&["train", "second.toml", "--out", "other", "--set", set]);
        assert_eq!(ended.code, Some(2), "{set}: {ended:?}");
        assert!(ended.stderr.contains(told), "{set}: {ended:?}");
    }
}

#[test]
fn every_nth_checkpoint_stays() {
    let workspace = Workspace::new();
    let changes = [
        ("train.steps", "7"),
        ("checkpoint.every", "1"),
        ("checkpoint.keep", "1"),
        ("checkpoint.keep_every", "3"),
    ];
    workspace.config("keep.toml", &changes);
    workspace.succeed(&["train", "keep.toml", "--out", "run"]);
    assert_eq!(workspace.checkpoints("run"), ["fsdp_cpt3", "fsdp_cpt6", "fsdp_cpt7", "latest"]);
}
