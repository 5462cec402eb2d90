//! The interface for other programs: the files of a run, their keys, and the sources of values.

use std::collections::BTreeSet;

use kiln::config::{Config, Schedule};
use serde_json::Value as Json;

use crate::support::{VOCAB, Workspace, names};

fn keys(line: &Json) -> BTreeSet<&str> {
    line.as_object().expect("an object").keys().map(String::as_str).collect()
}

#[test]
fn metrics_have_these_keys_and_no_others() {
    let workspace = Workspace::new();
    workspace.config("run.toml", &[("eval.every", "2"), ("train.steps", "5")]);
    workspace.succeed(&["train", "run.toml", "--out", "run"]);
    let metrics = workspace.metrics("run");
    let (steps, evaluations): (Vec<_>, Vec<_>) =
        metrics.iter().partition(|line| line.get("val_loss").is_none());
    let step_keys = BTreeSet::from([
        "step",
        "loss",
        "grad_norm",
        "lr",
        "tokens_per_s",
        "tokens",
        "mfu",
        "peak_bytes",
        "step_s",
        "tflops",
        "data_s",
        "forward_s",
        "backward_s",
        "optimizer_s",
        "other_s",
        "wait_s",
        "time",
    ]);
    for (index, line) in steps.iter().enumerate() {
        assert_eq!(keys(line), step_keys);
        assert_eq!(line["step"], index as u64 + 1);
        assert_eq!(line["tokens"], (index as u64 + 1) * 8 * 8);
        assert!(line["peak_bytes"].as_u64().unwrap() > 0);
        for key in step_keys.iter().filter(|key| **key != "mfu") {
            let may_be_zero = ["other_s", "wait_s"].contains(key);
            let value = line[*key].as_f64().unwrap();
            assert!(value > 0.0 || may_be_zero && value == 0.0, "{key}: {line}");
        }
    }
    assert_eq!(steps.len(), 5);
    for line in &evaluations {
        assert_eq!(keys(line), BTreeSet::from(["step", "val_loss", "val_tokens", "time"]));
        assert_eq!(line["val_tokens"], 8 * 8);
    }
    let at: Vec<_> = evaluations.iter().map(|line| line["step"].as_u64().unwrap()).collect();
    assert_eq!(at, [2, 4, 5]);
    // A loss over 64 tokens in f32 has many digits.
    let text = workspace.text("run/metrics.jsonl");
    let long = |line: &str| {
        let digits = line.split("\"loss\":").nth(1).unwrap().split(',').next().unwrap().len();
        digits > 10
    };
    assert!(text.lines().filter(|line| line.contains("\"loss\"")).any(long), "{text}");
}

/// The first runs on a machine measure the peak of the processor and store it. Metrics include `mfu` only after
/// two measurements agree; from then on, no run measures the peak again.
#[test]
fn mfu_needs_a_peak_that_is_known() {
    let workspace = Workspace::new();
    workspace.replace("run.toml", "peak_tflops = 1.0\n", "");
    let run = |out: &str| {
        let mut command = workspace.command(&["train", "run.toml", "--out", out]);
        let ended =
            workspace.end(command.env("XDG_CACHE_HOME", workspace.path("cache")).spawn().expect("a run"));
        assert_eq!((ended.code, &*ended.stderr), (Some(0), ""), "{ended:?}");
        let steps = workspace.metrics(out).into_iter().filter(|line| line.get("loss").is_some());
        let with_mfu: Vec<_> = steps.map(|line| line.get("mfu").is_some()).collect();
        (ended.stdout, with_mfu)
    };
    let (said, with_mfu) = run("first");
    assert_eq!(with_mfu, [false; 4]);
    assert!(said.contains("tok/s  wait") && !said.contains("mfu"), "{said}");
    let names = names(&workspace.path("cache/kiln/peaks"));
    assert_eq!(names.len(), 1, "{names:?}");
    let file = format!("cache/kiln/peaks/{}", names[0]);
    let measured = || workspace.json(&file)["measured"].as_array().expect("measurements").clone();
    let first = measured();
    assert_eq!(first.len(), 1);
    let keep = |measured: &[f64]| {
        let mut kept = workspace.json(&file);
        kept["measured"] = measured.into();
        workspace.write(&file, kept.to_string());
    };
    let best = first[0].as_f64().expect("FLOP/s");
    keep(&[best, 0.97 * best]);
    let before = workspace.text(&file);
    let (said, with_mfu) = run("known");
    assert_eq!(with_mfu, [true; 4]);
    assert!(said.contains("mfu"), "{said}");
    assert_eq!(workspace.text(&file), before, "measured again");
    keep(&[100.0 * best, best]);
    assert_eq!(run("scattered").1, [false; 4]);
    assert_eq!(measured().len(), 3);
}

#[test]
fn steps_are_logged_at_the_interval_and_at_both_ends() {
    let workspace = Workspace::new();
    workspace.config("run.toml", &[("log.every", "3"), ("train.steps", "7")]);
    workspace.succeed(&["train", "run.toml", "--out", "run"]);
    let logged: Vec<_> = workspace.steps("run").into_iter().map(|(step, ..)| step).collect();
    assert_eq!(logged, [1, 3, 6, 7]);
}

#[test]
fn the_resolved_configuration_starts_the_same_run() {
    let workspace = Workspace::new();
    let changes = ["--set", "model.dropout=0.2", "--set", "train.seed=5"];
    let first = [&["train", "run.toml", "--out", "first", "--ranks", "4"], &changes[..]].concat();
    workspace.succeed(&first);
    workspace.succeed(&["train", "first/config.toml", "--out", "second"]);
    assert_eq!(workspace.steps("first"), workspace.steps("second"));
    assert_eq!(workspace.val_loss("first"), workspace.val_loss("second"));
    assert_eq!(workspace.text("first/config.toml"), workspace.text("second/config.toml"));
    let other = workspace.kiln(&["train", "run.toml", "--out", "other"]);
    assert_eq!(other.code, Some(0));
    assert_ne!(workspace.losses("first"), workspace.losses("other"));
}

#[test]
fn arguments_go_before_the_file_and_later_ones_before_earlier_ones() {
    let workspace = Workspace::new();
    workspace.succeed(&[
        "train",
        "run.toml",
        "--out",
        "run",
        "--set",
        "optim.lr=5e-3",
        "--set",
        "optim.lr=2e-3",
        "--set",
        "optim.schedule=constant",
        "--set",
        "train.ranks=1",
        "--ranks",
        "4",
        "--set",
        "sample.prompt=a b",
    ]);
    let resolved: Config = toml::from_str(&workspace.text("run/config.toml")).unwrap();
    assert_eq!(resolved.optim.lr, 2e-3);
    assert_eq!(resolved.optim.schedule, Schedule::Constant);
    assert_eq!(resolved.train.ranks, 4);
    assert_eq!(resolved.sample.prompt, "a b");
    // Values from the file, from the data, and from the defaults.
    assert_eq!(resolved.train.steps, 4);
    assert_eq!(resolved.model.vocab_size, Some(VOCAB));
    assert_eq!(resolved.optim.beta2, 0.95);
    let lr = workspace.metrics("run")[3]["lr"].as_f64();
    assert_eq!(lr, Some(2e-3));
}

#[test]
fn a_run_without_a_folder_gets_the_next_free_one() {
    let workspace = Workspace::new();
    workspace.succeed(&["train", "run.toml"]);
    workspace.succeed(&["train", "run.toml", "--set", "train.steps=2"]);
    assert_eq!(workspace.steps("runs/run").len(), 4);
    assert_eq!(workspace.steps("runs/run-2").len(), 2);
    // Resumes the last run.
    workspace.succeed(&["train", "run.toml", "--resume", "latest"]);
    assert_eq!(workspace.steps("runs/run-2").len(), 4);
    assert!(!workspace.path("runs/run-3").exists());
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let workspace = Workspace::new();
    workspace.succeed(&["train", "run.toml", "--out", "one"]);
    workspace.succeed(&["train", "run.toml", "--out", "three", "--set", "device.threads=6"]);
    assert_eq!(workspace.steps("one"), workspace.steps("three"));
}
