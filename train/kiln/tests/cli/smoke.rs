//! `kiln train --smoke` and `kiln data show`: a preview of a run.

use crate::support::{Workspace, example};

#[test]
fn a_smoke_run_tries_everything_and_leaves_nothing() {
    let workspace = Workspace::new();
    workspace.config(
        "run.toml",
        &[("train.steps", "100000"), ("data.seq_len", "32"), ("train.global_batch", "64")],
    );
    let before = workspace.tree();
    for (more, said) in [
        (&["--smoke"][..], "d_model 16"),
        (&["--smoke=width", "--ranks", "1"], "d_model 64"),
        (&["--smoke", "--set", "optim.kind=muon", "--set", "shard.strategy=NO_SHARD"], "d_model 16"),
    ] {
        let stdout = workspace.succeed(&[&["train", "run.toml"][..], more].concat());
        assert!(stdout.contains(said), "{stdout}");
        assert!(stdout.contains("resuming (with the same bits) and sampling work"), "{stdout}");
        assert_eq!(stdout.matches("sample: ").count(), 2, "{stdout}");
        assert_eq!(workspace.tree(), before, "{more:?}");
    }
    // With a named folder, the results can be inspected.
    workspace.succeed(&["train", "run.toml", "--smoke", "--out", "smoke"]);
    assert_eq!(workspace.steps("smoke/straight").len(), 4);
    assert_eq!(workspace.steps("smoke/resumed"), workspace.steps("smoke/straight")[2..]);
    workspace.succeed(&["inspect", "smoke/resumed", "--verify"]);
}

#[test]
fn a_smoke_run_tries_the_programs_own_loop() {
    let workspace = Workspace::new();
    let ended = workspace.run(&example("own_trainer"), &["train", "run.toml", "--smoke"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stdout.contains("saved no checkpoint in the middle"), "{ended:?}");
    let every = ["--set", "experiment.every=2", "--set", "experiment.patience=9"];
    let ended =
        workspace.run(&example("own_trainer"), &[&["train", "run.toml", "--smoke"][..], &every].concat());
    assert!(ended.stdout.contains("resuming (with the same bits)"), "{ended:?}");
}

#[test]
fn what_a_smoke_run_cannot_do_is_said() {
    let workspace = Workspace::new();
    let launched = ["launch", "--nproc-per-node", "2", "--", "train", "run.toml", "--smoke"];
    let ended = workspace.kiln(&launched);
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(ended.stderr.contains("--smoke runs its ranks as threads"), "{ended:?}");
    let ended = workspace.kiln(&["train", "run.toml", "--smoke", "--resume", "latest"]);
    assert_eq!(ended.code, Some(2), "{ended:?}");
}

#[test]
fn prepared_data_are_shown_with_their_tokens() {
    let workspace = Workspace::new();
    workspace.write("text/a.txt", "one | two\nthree ".repeat(50));
    workspace.write("text/b.txt", "four five six ".repeat(80));
    workspace.succeed(&["data", "prepare", "--input", "text", "--out", "shown", "--vocab-size", "270"]);
    let show = |more: &[&str]| workspace.succeed(&[&["data", "show", "shown"][..], more].concat());
    let said = show(&["--samples", "2", "--seq-len", "16"]);
    let (info, lines) = (workspace.json("shown/data.json"), said.lines().collect::<Vec<_>>());
    assert!(
        lines[0].starts_with("shown: 2 documents in both splits, vocabulary 270, ids of 2 bytes"),
        "{said}"
    );
    let tokens = info["train"]["tokens"].as_u64().expect("a count");
    let numbers = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let training = numbers(lines[2]);
    assert_eq!((&training[0][..], &training[1]), ("training", &tokens.to_string()));
    assert_eq!(training.last(), Some(&((tokens - 1) / 16).to_string()));
    assert!(said.contains("training tokens: ") && said.contains("median"), "{said}");
    let shown: Vec<_> = lines.iter().filter(|line| line.starts_with('|')).collect();
    assert_eq!(shown.len(), 2, "{said}");
    // Every token is between two separators; separators in the text are escaped.
    for line in shown {
        assert_eq!(line.replace("\\|", "").matches('|').count(), 17, "{line}");
    }
    // The same sequences with which a run begins.
    assert_eq!(show(&["--samples", "2", "--seq-len", "16"]), said);
    assert_ne!(show(&["--samples", "2", "--seq-len", "16", "--seed", "1"]), said);
    let refused = workspace.kiln(&["data", "show", "text"]);
    assert_ne!(refused.code, Some(0));
    assert!(refused.stderr.contains("kiln data prepare"), "{refused:?}");
}
