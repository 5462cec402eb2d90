//! Your own data source and your own objective, `train/kiln/examples/own_source.rs` and `dpo.rs`: weights of targets,
//! frozen models, and every command on both. `multi_token.rs`, `distillation.rs` and `ema.rs` likewise.

use std::path::Path;

use crate::support::{Workspace, example};

/// Trains with `program` and returns the steps.
fn train(workspace: &Workspace, program: &Path, out: &str, settings: &[&str]) -> Vec<(u64, f64, f64)> {
    succeed(workspace, program, &[&["train", "run.toml", "--out", out][..], settings].concat());
    workspace.steps(out)
}

fn succeed(workspace: &Workspace, program: &Path, arguments: &[&str]) -> String {
    let ended = workspace.run(program, arguments);
    assert_eq!(ended.code, Some(0), "{arguments:?}: {ended:?}");
    assert_eq!(ended.stderr, "", "{arguments:?}");
    ended.stdout
}

/// Trains in ways that must give the same bits as `full`, and in others that differ in the order of sums.
fn check_equal_runs(workspace: &Workspace, program: &Path, settings: &[&str], full: &[(u64, f64, f64)]) {
    let train = |out: &str, more: &[&str]| train(workspace, program, out, &[settings, more].concat());
    let none = ["--set", "shard.strategy=NO_SHARD", "--set", "shard.accumulate=sharded"];
    assert_eq!(train("none", &none), full);
    assert_eq!(train("grad_op", &["--set", "shard.strategy=SHARD_GRAD_OP"]), full);
    let launch = ["launch", "--nproc-per-node", "2", "--", "train", "run.toml", "--out", "processes"];
    succeed(workspace, program, &[&launch[..], settings].concat());
    assert_eq!(workspace.steps("processes"), full);
    assert_eq!(train("again", &["--resume", "full/checkpoints/fsdp_cpt2"]), full[2..]);
    for (out, more) in [
        ("one", &["--ranks", "1"][..]),
        ("block", &["--set", "shard.recompute=block"]),
        ("whole", &["--set", "train.micro_batch=4"]),
    ] {
        for ((_, loss, _), (_, expected, _)) in train(out, more).iter().zip(full) {
            assert!((loss - expected).abs() <= 2e-5 * expected, "{out}: {loss} {expected}");
        }
    }
}

#[test]
fn a_source_of_your_own_has_every_command() {
    let workspace = Workspace::new();
    let program = example("own_source");
    let copy = ["data.source=copy", "data.path=made", "data.extra.digits=4", "data.seq_len=9"];
    let settings: Vec<_> = copy.iter().flat_map(|setting| ["--set", *setting]).collect();
    let full =
        train(&workspace, &program, "full", &[&settings[..], &["--set", "checkpoint.every=2"]].concat());
    // The prompt is masked, so a model that has learned nothing is as uncertain as ln 12.
    assert!((full[0].1 - 12f64.ln()).abs() < 0.2, "{full:?}");
    check_equal_runs(&workspace, &program, &settings, &full);
    let shown = succeed(&workspace, &program, &["data", "show", "made", "--samples", "1"]);
    let targets = shown.lines().find(|line| line.starts_with("targets: ")).expect("the targets");
    assert!(targets.starts_with("targets: |_|_|_|_|") && targets.ends_with("|11|"), "{shown}");
    let evaluated =
        succeed(&workspace, &program, &["eval", "full", "--data", "made", "--samples", "8", "--json"]);
    let evaluated: serde_json::Value = serde_json::from_str(&evaluated).expect("JSON");
    let val_loss = workspace.val_loss("full");
    assert!(
        (evaluated["val_loss"].as_f64().expect("a loss") - val_loss).abs() < 1e-6 * val_loss,
        "{evaluated}"
    );
    assert_eq!(evaluated["tokens"], 8 * 5, "masked targets do not count");
    succeed(&workspace, &program, &[&["check", "run.toml"][..], &settings].concat());
    for verified in [
        succeed(&workspace, &program, &["data", "verify", "made"]),
        workspace.succeed(&["data", "verify", "made"]),
    ] {
        assert!(verified.contains("made is intact: 2 files"), "{verified}");
    }
    let text = succeed(&workspace, &program, &["generate", "full", "--prompt", "1 2 3 4 10"]);
    assert!(text.contains("1 2 3 4 10"), "{text}");
    // Settings of text are not for samples.
    let bos = [&["train", "run.toml", "--out", "bos"][..], &settings, &["--set", "data.bos=true"]].concat();
    let ended = workspace.run(&program, &bos);
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(ended.stderr.contains("data.bos is a setting for data.text"), "{ended:?}");
    // `kiln` says what it lacks, and another length is a mistake of the source.
    let stock = workspace.kiln(&["data", "show", "made"]);
    assert!(
        stock.stderr.contains("data.source = \"copy\": this program has no sources of samples"),
        "{stock:?}"
    );
    let longer =
        [&["train", "run.toml", "--out", "longer"][..], &settings, &["--set", "data.seq_len=10"]].concat();
    let ended = workspace.run(&program, &longer);
    assert!(ended.stderr.contains("has 10 tokens instead of data.seq_len + 1 = 11"), "{ended:?}");
}

#[test]
fn an_objective_with_a_frozen_model_has_every_command() {
    let workspace = Workspace::new();
    let program = example("dpo");
    let pairs = ["data.source=pairs", "data.path=made", "data.seq_len=16"];
    let pairs: Vec<_> = pairs.iter().flat_map(|setting| ["--set", *setting]).collect();
    train(&workspace, &program, "base", &pairs);
    let own = ["init.from=base", "loss.kind=dpo", "loss.extra.beta=0.5", "loss.frozen.reference=base"];
    let own: Vec<_> = own.iter().flat_map(|setting| ["--set", *setting]).collect();
    let settings = [&pairs[..], &own].concat();
    let full =
        train(&workspace, &program, "full", &[&settings[..], &["--set", "checkpoint.every=2"]].concat());
    // The policy begins as the reference, and improves on it.
    assert!((full[0].1 - 2f64.ln()).abs() < 1e-6 && full[3].1 < full[0].1, "{full:?}");
    check_equal_runs(&workspace, &program, &settings, &full);
    let lines = workspace.text("full/metrics.jsonl");
    let values: Vec<serde_json::Value> =
        lines.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(values[0]["objective.margin"], 0.0, "{lines}");
    assert!(values[3]["objective.margin"].as_f64().expect("a margin") > 0.0, "{lines}");
    let evaluated = values.iter().find_map(|value| value["val_objective"].as_f64()).expect("an evaluation");
    assert!(evaluated > 0.0 && evaluated < 2f64.ln(), "{evaluated}");
    succeed(&workspace, &program, &[&["check", "run.toml"][..], &settings].concat());
    let odd =
        [&["train", "run.toml", "--out", "odd"][..], &settings, &["--set", "train.micro_batch=1"]].concat();
    let ended = workspace.run(&program, &odd);
    assert!(
        ended.stderr.contains("train.micro_batch = 1: 2 samples of this data source belong together"),
        "{ended:?}"
    );
    let missing = [&["train", "run.toml", "--out", "missing"][..], &pairs, &own[..6]].concat();
    let ended = workspace.run(&program, &missing);
    assert!(ended.stderr.contains("--set loss.frozen.reference=runs/base"), "{ended:?}");
}

#[test]
fn an_extra_head_trains_with_the_objective_alone() {
    let workspace = Workspace::new();
    let program = example("multi_token");
    let own = ["loss.kind=multi_token", "loss.extra.weight=0.5", "model.head_layer=second"];
    let settings: Vec<_> = own.iter().flat_map(|setting| ["--set", *setting]).collect();
    let full =
        train(&workspace, &program, "full", &[&settings[..], &["--set", "checkpoint.every=2"]].concat());
    check_equal_runs(&workspace, &program, &settings, &full);
    // The extra head has its share of the loss, and the model without it evaluates and generates.
    let metrics = workspace.metrics("full");
    let second = metrics[0]["objective.second"].as_f64().expect("a value");
    // One of eight positions has no second target.
    assert!((full[0].1 - (8.0 / 7.0 + 0.5) * second).abs() < 0.2, "{full:?} {second}");
    let manifest = workspace.text("full/checkpoints/fsdp_cpt4/manifest.json");
    assert!(manifest.contains("head_layer.attention."), "{manifest}");
    succeed(&workspace, &program, &["generate", "full", "--prompt", "a", "--max-tokens", "4"]);
    succeed(&workspace, &program, &[&["check", "run.toml"][..], &settings].concat());
    let stock = workspace.kiln(&["eval", "full"]);
    assert!(stock.stderr.contains("head_layer") && stock.stderr.contains("second"), "{stock:?}");

    let untrained = ["train", "run.toml", "--out", "untrained", "--set", "model.head_layer=second"];
    let ended = workspace.run(&program, &untrained);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let warning =
        "loss.kind = \"cross_entropy\" does not train the extra head, model.head_layer = \"second\"";
    assert!(ended.stderr.contains(warning), "{ended:?}");

    // Without the extra head, the model is the same.
    let exported = workspace.succeed(&["export", "full", "--out", "hf"]);
    assert!(exported.contains("left out: the extra head `second`"), "{exported}");
    let evaluate = |program: &Path, model: &str| {
        let arguments = ["eval", model, "--data", "data", "--samples", "8", "--seq-len", "8", "--json"];
        let evaluated = succeed(&workspace, program, &arguments);
        serde_json::from_str::<serde_json::Value>(&evaluated).expect("JSON")["val_loss"].clone()
    };
    let kiln = Path::new(crate::PROGRAM);
    assert_eq!(evaluate(kiln, "hf"), evaluate(&program, "full"));
    let dropped = ["train", "run.toml", "--out", "dropped", "--set", "init.from=full", "--allow-other-parts"];
    let refused = workspace.kiln(&dropped);
    assert!(refused.stderr.contains("or leave weights out with --allow-missing"), "{refused:?}");
    let allowed = ["--allow-missing", "head_layer.*", "--set", "optim.lr=0.0"];
    let ended = workspace.kiln(&[&dropped[..], &allowed].concat());
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stdout.contains("not in the model, left out: head_layer.attention."), "{ended:?}");
    assert_eq!(evaluate(kiln, "dropped"), evaluate(kiln, "hf"));
}

#[test]
fn a_student_learns_from_a_frozen_teacher() {
    let workspace = Workspace::new();
    let program = example("distillation");
    workspace.succeed(&[
        "train",
        "run.toml",
        "--out",
        "teacher",
        "--set",
        "model.d_model=24",
        "--set",
        "train.steps=8",
    ]);
    let settings = ["--set", "loss.kind=distillation", "--set", "loss.frozen.teacher=teacher"];
    let full =
        train(&workspace, &program, "full", &[&settings[..], &["--set", "checkpoint.every=2"]].concat());
    assert!(full[3].1 < full[0].1, "{full:?}");
    check_equal_runs(&workspace, &program, &settings, &full);
}

#[test]
fn averaged_weights_are_state_of_the_optimizer() {
    let workspace = Workspace::new();
    let program = example("ema");
    let settings = ["--set", "optim.kind=ema", "--set", "eval.every=2"];
    let full =
        train(&workspace, &program, "full", &[&settings[..], &["--set", "checkpoint.every=2"]].concat());
    // The average does not change the training, and the loop restores the weights.
    workspace.succeed(&["train", "run.toml", "--out", "stock"]);
    assert_eq!(workspace.steps("stock"), full);
    assert_eq!(workspace.val_loss("full"), workspace.val_loss("stock"));
    check_equal_runs(&workspace, &program, &settings, &full);
    let told =
        succeed(&workspace, &program, &[&["train", "run.toml", "--out", "told"][..], &settings].concat());
    let lines: Vec<_> = told.lines().filter(|line| line.contains("of the average")).collect();
    assert_eq!(lines.len(), 2, "{told}");
}
