//! Your own program, `train/kiln/examples/own_layer.rs`, has every command on its layer, and `kiln` reports that
//! it lacks the layer.

use crate::support::{Ended, Workspace, example};

fn own(workspace: &Workspace, arguments: &[&str]) -> Ended {
    workspace.run(&example("own_layer"), arguments)
}

const LAYER: [&str; 4] = ["--set", "model.feed_forward=relu3", "--set", "model.extra.scale=0.5"];

#[test]
fn it_has_every_command() {
    let workspace = Workspace::new();
    let succeed = |arguments: &[&str]| {
        let ended = own(&workspace, arguments);
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
    let first = "full/checkpoints/fsdp_cpt2";
    assert_eq!(train("again", &["--resume", first]), full[2..]);
    assert_ne!(train("other", &["--set", "model.extra.scale=0.25"]), full);

    assert!(succeed(&["eval", "--checkpoint", "full", "--ranks", "2"]).contains("loss"));
    succeed(&["generate", "--checkpoint", "full", "--prompt", "a", "--max-tokens", "4"]);
    let said = succeed(&["inspect", "full"]);
    assert!(said.contains("architecture: decoder with feed_forward `relu3`, not built in"), "{said}");
    succeed(&["convert", "--checkpoint", "full", "--out", "converted"]);
    workspace.config("own.toml", &[("model.feed_forward", "'relu3'")]);
    succeed(&[
        "bench",
        "strategies",
        "--config",
        "own.toml",
        "--ranks",
        "2",
        "--steps",
        "1",
        "--rounds",
        "1",
    ]);
    let kiln_lacks_it = workspace.kiln(&["bench", "strategies", "--config", "own.toml", "--ranks", "2"]);
    assert!(kiln_lacks_it.stderr.contains("model.feed_forward = \"relu3\""), "{kiln_lacks_it:?}");
}

#[test]
fn what_is_not_there_is_named() {
    let workspace = Workspace::new();
    let said = own(&workspace, &["train", "run.toml", "--out", "run", "--set", "model.feed_forward=relu4"]);
    assert_eq!(said.code, Some(2), "{said:?}");
    for part in ["model.feed_forward = \"relu4\"", "\"relu3\"", "\"swiglu\""] {
        assert!(said.stderr.contains(part), "{said:?}");
    }
    let said = own(
        &workspace,
        &[
            "train",
            "run.toml",
            "--out",
            "run",
            "--set",
            "model.feed_forward=relu3",
            "--set",
            "model.extra.scales=1",
        ],
    );
    assert_eq!(said.code, Some(2), "{said:?}");
    assert!(said.stderr.contains("model.extra.scales: unknown field `scales`"), "{said:?}");
    let unread = ["train", "run.toml", "--out", "run", "--set", "model.extra.scale=1"];
    let said = workspace.kiln(&unread);
    assert_eq!(said.code, Some(2), "{said:?}");
    let reason = "model.extra.scale: no part of this program reads this setting: remove it or correct it";
    assert!(said.stderr.contains(reason), "{said:?}");
    let said = workspace.kiln(&[&["train", "run.toml", "--out", "run"][..], &LAYER].concat());
    assert_eq!(said.code, Some(2), "{said:?}");
    assert!(said.stderr.contains("model.feed_forward = \"relu3\""), "{said:?}");
    assert!(!workspace.path("run").exists(), "nothing was begun");

    own(&workspace, &[&["train", "run.toml", "--out", "run"][..], &LAYER].concat());
    let said = workspace.kiln(&["eval", "--checkpoint", "run"]);
    assert_eq!(said.code, Some(2), "{said:?}");
    assert!(said.stderr.contains("was trained with feed_forward `relu3`"), "{said:?}");
}

/// The commands in the "next" lines name the program that has the layer, and they work.
#[test]
fn what_is_next_works() {
    let workspace = Workspace::new();
    let train = ["train", "run.toml", "--ranks", "1"];
    let run = |out: &str, more: &[&str]| {
        let ended = own(&workspace, &[&train[..], &["--out", out], more].concat());
        assert_eq!(ended.code, Some(0), "{ended:?}");
        let next = ended.stdout.lines().skip_while(|line| !line.starts_with("next "));
        next.map(|line| line.trim_start_matches("next").trim().to_owned()).collect::<Vec<_>>()
    };
    let program = example("own_layer").display().to_string();
    let next = run("own", &LAYER);
    let expected = ["generate own --prompt \"...\"", "eval own"];
    assert_eq!(next, expected.map(|line| format!("{program} {line}")));
    // The layout of Hugging Face has no such layer, so both programs refuse the export.
    let export = ["export", "--checkpoint", "own", "--out", "hf"];
    for refused in [own(&workspace, &export), workspace.kiln(&export)] {
        assert_eq!(refused.code, Some(2), "{refused:?}");
        assert!(refused.stderr.contains("feed_forward relu3"), "{refused:?}");
        assert!(!refused.stderr.contains("use the program that has"), "{refused:?}");
    }
    // With built-in layers, it can be exported.
    let next = run("stock", &[]);
    assert_eq!(next.last().expect("a line"), &format!("{program} export stock --out DIR"));
    let ended = own(&workspace, &["export", "--checkpoint", "stock", "--out", "hf"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
}

#[test]
fn settings_that_are_not_numbers_are_refused_by_name() {
    let workspace = Workspace::new();
    for value in ["nan", "-inf", "[1.0, inf]", "{ inner = nan }"] {
        let set = format!("model.extra.scale={value}");
        let said = own(
            &workspace,
            &["train", "run.toml", "--out", "run", "--set", "model.feed_forward=relu3", "--set", &set],
        );
        assert_eq!(said.code, Some(2), "{said:?}");
        assert!(said.stderr.contains(&format!("--set {set}: expected a finite number")), "{said:?}");
    }
    workspace.config("own.toml", &[("model.extra", "{ scale = nan }")]);
    let said = own(&workspace, &["train", "own.toml", "--out", "run"]);
    assert!(said.code == Some(2) && said.stderr.contains("model.extra.scale: expected a finite"), "{said:?}");
}
