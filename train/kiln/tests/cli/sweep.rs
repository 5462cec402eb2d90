//! `kiln sweep`: its runs, their comparison, and a sweep that is stopped and continued.

use std::fs;
use std::time::SystemTime;

use kiln_testkit::wait_until;
use rustix::process::Signal;
use serde_json::Value as Json;

use crate::support::{Workspace, names, signal};

/// A run of four steps with an evaluation.
fn workspace() -> Workspace {
    let workspace = Workspace::new();
    workspace.config("run.toml", &[("train.steps", "4"), ("eval.every", "4")]);
    workspace
}

const GRIDS: [&str; 4] = ["--grid", "optim.lr=1e-3,1e-2", "--grid", "shard.strategy=FULL_SHARD,NO_SHARD"];

#[test]
fn every_combination_is_run_and_compared() {
    let workspace = workspace();
    let text = workspace.succeed(&[&["sweep", "run.toml", "--seeds", "2"], &GRIDS[..]].concat());
    assert!(text.contains("sweep: 8 runs in runs/run-sweep, 8 left"), "{text}");
    let rows: Vec<_> = text.lines().filter(|line| line.contains("_SHARD ")).collect();
    assert_eq!(rows.len(), 4, "{text}");
    assert!(rows.iter().all(|row| row.contains("  2/2  ")), "{text}");
    let csv = workspace.text("runs/run-sweep/sweep.csv");
    assert!(csv.starts_with("optim.lr,shard.strategy,run,val_loss,failure\n"), "{csv}");
    assert_eq!(csv.lines().count(), 9, "{csv}");
    let plot = workspace.text("runs/run-sweep/sweep-optim.lr.svg");
    assert!(plot.contains("val_loss by optim.lr") && plot.contains("shard.strategy NO_SHARD"), "{plot}");

    // Nothing is left: the table is printed again, as JSON. Equal seeds have equal results in f32.
    let again = [&["sweep", "run.toml", "--seeds", "2", "--json"], &GRIDS[..]].concat();
    let report: Json = serde_json::from_str(&workspace.succeed(&again)).expect("JSON");
    assert_eq!(report["result"], "val_loss");
    let rows = report["rows"].as_array().expect("rows");
    let means: Vec<_> = rows.iter().map(|row| row["mean"].as_f64().expect("a mean")).collect();
    assert!(
        means.is_sorted() && means[0] == means[1] && means[2] == means[3] && means[1] < means[2],
        "{means:?}"
    );
    let run = rows[0]["runs"][0].clone();
    let folder = run["folder"].as_str().expect("a folder");
    assert_eq!(run["result"].as_f64(), Some(workspace.val_loss(folder)));
}

#[test]
fn a_stopped_sweep_continues_and_repeats_nothing() {
    let workspace = workspace();
    let command = [&["sweep", "run.toml", "--jobs", "1"], &GRIDS[..]].concat();
    // The runs have steps enough to be stopped in the middle.
    let slow = [&command[..], &["--set", "train.steps=400", "--set", "checkpoint.every=20"]].concat();
    let child = workspace.start(&slow);
    let out = workspace.path("runs/run-sweep");
    wait_until("the second run is at work", || {
        fs::read_to_string(out.join("lr=1e-3,strategy=NO_SHARD/metrics.jsonl"))
            .is_ok_and(|text| text.lines().count() > 2)
    });
    signal(&child, Signal::TERM);
    let ended = workspace.end(child);
    assert_eq!(ended.code, Some(75), "{ended:?}");
    assert!(ended.stdout.contains("stopped: the same command continues the sweep"), "{}", ended.stdout);
    let first = out.join("lr=1e-3,strategy=FULL_SHARD");
    let changed = |name: &str| -> SystemTime {
        fs::metadata(first.join(name)).and_then(|file| file.modified()).expect("a time")
    };
    let before = ["metrics.jsonl", "events.jsonl"].map(changed);

    let text = workspace.succeed(&slow);
    assert!(text.contains("4 runs") && text.contains("3 left"), "{text}");
    assert_eq!(["metrics.jsonl", "events.jsonl"].map(changed), before);
    let events = workspace.text("runs/run-sweep/lr=1e-3,strategy=NO_SHARD/events.jsonl");
    assert_eq!(events.matches("\"kind\":\"resume\"").count(), 1, "{events}");
    for folder in names(&out).into_iter().filter(|name| name.starts_with("lr=")) {
        assert_eq!(workspace.steps(&format!("runs/run-sweep/{folder}")).len(), 400, "{folder}");
    }
}

#[test]
fn a_failed_run_is_reported_and_not_repeated() {
    let workspace = workspace();
    let command = ["sweep", "run.toml", "--grid", "optim.lr=1e-3,1e30", "--set", "optim.grad_clip=0"];
    let ended = workspace.kiln(&command);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stdout.contains("lr=1e30 failed: step "), "{}", ended.stdout);
    assert!(
        ended
            .stdout
            .lines()
            .any(|line| line.contains("1e30") && line.contains("0/1") && line.ends_with("1 failed"))
    );
    let events = || workspace.text("runs/run-sweep/lr=1e30/events.jsonl");
    let before = events();
    assert_eq!(workspace.kiln(&command).code, Some(1));
    assert_eq!(events(), before);
    assert_eq!(workspace.kiln(&[&command[..], &["--retry"]].concat()).code, Some(1));
    assert_ne!(events(), before);
}

#[test]
fn mistakes_are_found_before_the_first_run() {
    let workspace = workspace();
    workspace.write("other/notes.txt", "mine");
    let wrong = |arguments: &[&str], expected: &str| {
        let ended = workspace.kiln(&[&["sweep", "run.toml"], arguments].concat());
        assert_eq!(ended.code, Some(2), "{ended:?}");
        assert!(ended.stderr.contains(expected), "{}", ended.stderr);
        assert!(!workspace.path("runs").exists(), "{arguments:?}");
    };
    wrong(&["--grid", "optim.lr"], "expected a key and its values");
    wrong(&["--grid", "optim.lr=1e-3,"], "a value is empty");
    wrong(&["--grid", "optim.lr=1,1"], "1 is listed twice");
    wrong(&["--grid", "optim.lr=1,2", "--grid", "optim.lr=3"], "this key has another grid");
    wrong(&["--grid", "optim.lr=1,2", "--set", "optim.lr=3"], "--set has this key as well");
    wrong(&["--grid", "optim.lrate=1,2"], "--grid optim.lrate=1");
    wrong(&["--grid", "optim.lr=1e-3,-1"], "optim.lr");
    wrong(&["--grid", "optim.lr=1,2", "--seeds", "20000"], "40000 runs, and a sweep has at most 10000");
    wrong(&["--grid", "train.seed=1,2", "--seeds", "2"], "train.seed has a grid: remove --seeds");
    wrong(&["--grid", "optim.lr=1,2", "--out", "other"], "other holds other files");
    assert_eq!(workspace.text("other/notes.txt"), "mine");
}

#[test]
fn the_folder_of_another_sweep_is_refused() {
    let workspace = workspace();
    workspace.succeed(&["sweep", "run.toml", "--grid", "optim.lr=1e-3"]);
    // More values and seeds belong to the same sweep.
    let text = workspace.succeed(&["sweep", "run.toml", "--grid", "optim.lr=1e-3,2e-3", "--seeds", "2"]);
    assert!(text.contains("4 runs") && text.contains("3 left"), "{text}");
    let ended = workspace.kiln(&["sweep", "run.toml", "--grid", "optim.lr=1e-3", "--set", "train.steps=5"]);
    assert_eq!(ended.code, Some(2));
    assert!(
        ended.stderr.contains("runs/run-sweep holds a sweep of another configuration"),
        "{}",
        ended.stderr
    );
}
