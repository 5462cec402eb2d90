//! A run whose folder is moved, replaced or removed during the run: the run saves in the original folder or
//! nowhere, and reports the loss.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Child;

use kiln_testkit::wait_until;
use rustix::process::Signal;

use crate::run_folder::{FOREVER, assert_refused, in_run, wait_for_a_step};
use crate::support::{Ended, Workspace, signal};

const LOST: &str = "is no longer this run's folder: it was moved, removed or replaced";

fn latest(workspace: &Workspace, out: &str) -> Option<String> {
    fs::read_to_string(workspace.path(out).join("checkpoints/latest")).ok()
}

fn wait_for_another_checkpoint(workspace: &Workspace, out: &str) {
    let before = latest(workspace, out);
    wait_until("another checkpoint", || latest(workspace, out).is_some_and(|now| Some(now) != before));
}

fn stopped(workspace: &Workspace, run: Child) -> Ended {
    signal(&run, Signal::USR1);
    workspace.end(run)
}

fn assert_lost(ended: &Ended) {
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains(LOST), "{ended:?}");
}

/// Returns all files in `out` and their contents.
fn files_in(workspace: &Workspace, out: &str) -> Vec<(PathBuf, Option<Vec<u8>>)> {
    let out = workspace.path(out);
    workspace.tree().into_iter().filter(|(path, _)| path.starts_with(&out)).collect()
}

#[test]
fn a_link_that_is_pointed_elsewhere_does_not_move_a_run() {
    let workspace = Workspace::new();
    let other = ["train", "run.toml", "--out", "other", "--set", "checkpoint.every=1"];
    workspace.succeed(&other);
    fs::create_dir(workspace.path("mine")).expect("a folder");
    symlink("mine", workspace.path("cur")).expect("a link");
    let before = files_in(&workspace, "other");
    let keep = ["--out", "cur/", "--set", "checkpoint.every=1", "--set", "checkpoint.keep=1"];
    let run = workspace.start(&[&FOREVER[..], &keep].concat());
    wait_for_another_checkpoint(&workspace, "mine");
    symlink("other", workspace.path("next")).expect("a link");
    fs::rename(workspace.path("next"), workspace.path("cur")).expect("a link");
    for _ in 0..3 {
        wait_for_another_checkpoint(&workspace, "mine");
    }
    let ended = stopped(&workspace, run);
    assert_eq!(ended.code, Some(75), "{ended:?}");
    assert!(files_in(&workspace, "other") == before);
}

#[test]
fn a_run_whose_folder_was_moved_leaves_the_next_one_alone() {
    let workspace = Workspace::new();
    let old = workspace.start(&in_run(&FOREVER, &["--set", "checkpoint.on_failure='continue'"]));
    wait_for_a_step(&workspace, "run");
    fs::rename(workspace.path("run"), workspace.path("run.old")).expect("it moves");
    workspace.succeed(&["train", "run.toml", "--out", "run", "--set", "checkpoint.every=1"]);
    let before = files_in(&workspace, "run");
    assert_lost(&stopped(&workspace, old));
    let after = files_in(&workspace, "run");
    assert!(after == before, "{:?}", after.iter().map(|(path, _)| path).collect::<Vec<_>>());
}

#[test]
fn a_run_whose_folder_is_gone_ends_whatever_its_failed_saves_mean() {
    for format in ["sharded", "full"] {
        let workspace = Workspace::new();
        let format = format!("checkpoint.format='{format}'");
        let saves = ["checkpoint.every=1", "checkpoint.on_failure='continue'", &format];
        let saves: Vec<&str> = saves.iter().flat_map(|value| ["--set", *value]).collect();
        let run = workspace.start(&in_run(&FOREVER, &saves));
        wait_for_another_checkpoint(&workspace, "run");
        // The folder is moved at once, whatever the run is writing.
        fs::rename(workspace.path("run"), workspace.path("trash")).expect("it moves");
        assert_lost(&workspace.end(run));
        assert!(!workspace.path("run").exists());
    }
}

#[test]
fn a_run_that_lives_keeps_others_out_also_without_its_lock() {
    let workspace = Workspace::new();
    workspace.succeed(&["train", "run.toml", "--out", "run", "--set", "train.steps=2"]);
    let resume = ["--resume", "latest"];
    let run = workspace.start(&in_run(&FOREVER, &resume));
    let pid = format!("pid {}, since 2", run.id());
    workspace.wait_for_steps("run", 3);
    workspace.remove("run/.kiln/lock");
    let ended = workspace.kiln(&in_run(&FOREVER, &resume));
    assert_refused(&ended, &["run is in use by a run on host ", &pid]);
    assert_lost(&stopped(&workspace, run));
    workspace.succeed(&in_run(&["train", "run.toml"], &resume));
}

#[test]
fn a_launched_run_whose_folder_is_gone_ends_with_an_error() {
    let workspace = Workspace::new();
    let launch = ["launch", "--nproc-per-node", "2", "--max-restarts", "0", "--"];
    let run = workspace.start(&[&launch[..], &in_run(&FOREVER, &[])].concat());
    wait_for_a_step(&workspace, "run");
    fs::rename(workspace.path("run"), workspace.path("trash")).expect("it moves");
    let ended = stopped(&workspace, run);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains(LOST), "{ended:?}");
    assert!(!workspace.path("run").exists(), "nothing is written in its old place");
    let metrics = workspace.metrics("trash");
    assert!(metrics.iter().any(|line| line.get("loss").is_some()), "what was logged stays");
}
