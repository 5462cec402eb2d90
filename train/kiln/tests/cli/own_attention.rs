//! Your own program, `train/kiln/examples/own_attention.rs`: its attention layer keeps keys and values in the
//! cache of `generate`.

use crate::support::{Workspace, example, tokenizer};

const LAYER: [&str; 4] = ["--set", "model.attention=alibi", "--set", "model.extra.steepest=0.25"];

#[test]
fn it_has_every_command() {
    let workspace = Workspace::new();
    let succeed = |arguments: &[&str]| {
        let ended = workspace.run(&example("own_attention"), arguments);
        assert_eq!(ended.code, Some(0), "{arguments:?}: {ended:?}");
        ended.stdout
    };
    let train = |out: &str, more: &[&str]| {
        succeed(&[&["train", "run.toml", "--ranks", "2", "--out", out][..], &LAYER, more].concat());
        workspace.steps(out)
    };
    let full = train("full", &["--set", "checkpoint.every=2"]);
    let none = ["--set", "shard.strategy=NO_SHARD", "--set", "shard.accumulate=sharded"];
    assert_eq!(train("none", &none), full);
    let processes = ["launch", "--nproc-per-node", "2", "--", "train", "run.toml", "--out", "processes"];
    succeed(&[&processes[..], &LAYER].concat());
    assert_eq!(workspace.steps("processes"), full);
    assert_eq!(train("again", &["--resume", "full/checkpoints/fsdp_cpt2"]), full[2..]);
    assert_ne!(train("other", &["--set", "model.extra.steepest=0.5"]), full);

    assert!(succeed(&["eval", "--checkpoint", "full", "--ranks", "2"]).contains("loss"));
    let said = succeed(&["inspect", "full"]);
    assert!(said.contains("architecture: decoder with attention `alibi`, not built in"), "{said}");
    succeed(&["convert", "--checkpoint", "full", "--out", "converted"]);
    let said = workspace.kiln(&["eval", "--checkpoint", "full"]);
    assert!(said.stderr.contains("was trained with attention `alibi`"), "{said:?}");
}

/// Text generated token by token equals text whose every token is computed with an empty cache.
#[test]
fn its_cache_changes_no_token() {
    let workspace = Workspace::new();
    let ids = tokenizer().encode(&"abcdefg".repeat(250)).expect("ids");
    let ids: Vec<u16> = ids.into_iter().map(|id| u16::try_from(id).expect("a small id")).collect();
    workspace.write_data("data", &ids);
    workspace.config("run.toml", &[("train.steps", "40"), ("optim.lr", "3e-2")]);
    let succeed = |arguments: &[&str]| {
        let ended = workspace.run(&example("own_attention"), arguments);
        assert_eq!(ended.code, Some(0), "{arguments:?}: {ended:?}");
        ended.stdout
    };
    succeed(&[&["train", "run.toml", "--out", "run"][..], &LAYER].concat());
    let generate = |prompt: &str, tokens: &str| {
        let arguments = ["generate", "--checkpoint", "run", "--temperature", "0", "--max-tokens", tokens];
        succeed(&[&arguments[..], &["--prompt", prompt]].concat()).trim_end().to_owned()
    };
    let whole = generate("abc", "5");
    let mut text = "abc".to_owned();
    for _ in 0..5 {
        text = generate(&text, "1");
    }
    assert_eq!(text, whole);
    assert_eq!(whole, "abcdefga");
}
