//! Starts that ended before producing anything, and folders that are nearly empty.

use std::fs;
use std::os::unix::fs::symlink;

use sha2::Digest as _;

use crate::run_folder::assert_refused;
use crate::support::Workspace;

const RUN: [&str; 4] = ["train", "run.toml", "--out", "run"];

/// If there is nothing to resume from, only one command is suggested, and it works.
#[test]
fn a_run_that_failed_before_its_first_checkpoint_is_started_again() {
    let workspace = Workspace::new();
    let ended = workspace.kiln(&[&RUN[..], &["--fault", "error@data:3:0"]].concat());
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let failed = workspace.text("run/metrics.jsonl");
    assert_eq!(workspace.steps("run").len(), 2);
    let id = workspace.json("run/run.json")["id"].clone();
    // There is nothing to resume, and with another configuration it would be a different run.
    let ended = workspace.kiln(&[&RUN[..], &["--resume", "latest"]].concat());
    assert_refused(&ended, &["no checkpoint in run/checkpoints", "without --resume"]);
    let ended = workspace.kiln(&[&RUN[..], &["--set", "optim.lr=0.5"]].concat());
    let says = "run holds a run without a complete checkpoint, and this configuration differs";
    assert_refused(&ended, &[says, "repeat the run's original command", "--out"]);
    assert!(!ended.stderr.contains("--resume"), "{ended:?}");
    assert_eq!(workspace.text("run/metrics.jsonl"), failed);

    let said = workspace.succeed(&RUN);
    assert!(said.contains("its metrics are now in run/metrics-superseded.jsonl"), "{said}");
    assert_eq!(workspace.text("run/metrics-superseded.jsonl"), failed);
    assert_eq!(workspace.steps("run").len(), 4);
    assert_eq!(workspace.json("run/run.json")["id"], id);
    assert_eq!(workspace.checkpoints("run"), ["fsdp_cpt4", "latest"]);
    // Now the folder has a checkpoint that a new run would lose.
    assert_refused(&workspace.kiln(&RUN), &["already holds a run", "continue it with --resume "]);
}

/// The log lines of a failed run never become part of another run, whatever checkpoint the other run resumes from.
#[test]
fn a_run_from_elsewhere_does_not_continue_the_metrics_of_one_that_failed() {
    let workspace = Workspace::new();
    workspace.succeed(&["train", "run.toml", "--out", "other", "--set", "train.steps=2"]);
    let ended = workspace.kiln(&[&RUN[..], &["--fault", "error@data:3:0"]].concat());
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let failed = workspace.text("run/metrics.jsonl");
    let resume = ["--resume", "other/checkpoints/fsdp_cpt2"];
    workspace.succeed(&[&RUN[..], &resume].concat());
    assert_eq!(workspace.steps("run").first().map(|line| line.0), Some(3));
    assert_eq!(workspace.text("run/metrics-superseded.jsonl"), failed);
}

/// Checkpoints that cannot be read still count as checkpoints.
#[test]
fn a_folder_of_checkpoints_that_is_none_is_told() {
    let workspace = Workspace::new();
    let ended = workspace.kiln(&[&RUN[..], &["--fault", "error@data:3:0"]].concat());
    assert_eq!(ended.code, Some(1), "{ended:?}");
    workspace.remove("run/checkpoints");
    workspace.write("run/checkpoints", "");
    let ended = workspace.kiln(&RUN);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains("cannot list run/checkpoints: "), "{ended:?}");
}

/// A process may be killed after it has written a checkpoint and before it writes `latest`.
#[test]
fn a_checkpoint_that_latest_does_not_name_yet_is_gone_on_with() {
    let workspace = Workspace::new();
    workspace.config("run.toml", &[("checkpoint.every", "1")]);
    workspace.succeed(&[&RUN[..], &["--set", "train.steps=2"]].concat());
    workspace.write("run/checkpoints/latest", "fsdp_cpt1");
    let said = workspace.succeed(&[&RUN[..], &["--resume", "latest"]].concat());
    assert!(said.contains("resuming from run/checkpoints/fsdp_cpt2"), "{said}");
    let word = "run/checkpoints/latest did not name the newest complete checkpoint, that of step 2";
    assert!(said.contains(word), "{said}");
    assert_eq!(workspace.text("run/checkpoints/latest"), "fsdp_cpt4");
    assert!(!workspace.path("run/superseded-1").exists());
    assert_eq!(workspace.steps("run").len(), 4);
}

/// Leftovers of a process killed while removing a checkpoint.
#[test]
fn the_rest_of_an_old_checkpoint_is_removed_by_the_next_start() {
    let workspace = Workspace::new();
    workspace.succeed(&[&RUN[..], &["--set", "train.steps=2"]].concat());
    workspace.write("run/checkpoints/.fsdp_cpt1.removed/model-part-00001-of-00002.safetensors", "");
    workspace.succeed(&[&RUN[..], &["--resume", "latest"]].concat());
    assert_eq!(workspace.checkpoints("run"), ["fsdp_cpt2", "fsdp_cpt4", "latest"]);
}

#[test]
fn a_folder_that_is_empty_to_its_user_will_do() {
    for inside in ["lost+found", ".git"] {
        let workspace = Workspace::new();
        fs::create_dir_all(workspace.path("run").join(inside)).expect("a folder");
        workspace.write("run/.nfs0000000000000001", "of a file that was removed while it was open");
        workspace.succeed(&RUN);
        assert!(workspace.path("run").join(inside).is_dir());
    }
}

#[test]
fn a_link_to_nothing_says_where_it_leads() {
    let workspace = Workspace::new();
    symlink("disk/gone", workspace.path("run")).expect("a link");
    let launch = [&["launch", "--nproc-per-node", "2", "--"][..], &RUN].concat();
    let below = ["train", "run.toml", "--out", "run/below"];
    for command in [&RUN[..], &below, &launch] {
        let ended = workspace.kiln(command);
        assert_refused(&ended, &["run is a link to disk/gone, which is not there: create that"]);
    }
    assert!(!workspace.path("disk").exists());
    fs::create_dir_all(workspace.path("disk/gone")).expect("a folder");
    workspace.succeed(&RUN);
}

/// A killed process cannot remove its temporary folder; the next process with the same output does.
#[test]
fn what_a_killed_command_has_left_is_removed_by_the_next() {
    let workspace = Workspace::new();
    workspace.succeed(&RUN);
    // These names identify the kernel, because processes of other machines are not visible here.
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("a kernel's id");
    let digest = sha2::Sha256::digest(boot.trim());
    let kernel: String = digest[..4].iter().map(|byte| format!("{byte:02x}")).collect();
    let left = ["full", "hf", "imported"].map(|out| format!(".{out}.kiln-{kernel}-999999-0"));
    for folder in &left {
        workspace.write(&format!("{folder}/model-00001-of-00002.safetensors"), "half");
    }
    workspace.write(".full.kiln-mine/notes", "mine");
    workspace.succeed(&["convert", "--checkpoint", "run", "--out", "full"]);
    workspace.succeed(&["export", "--checkpoint", "run", "--out", "hf"]);
    workspace.succeed(&["import", "--hf", "hf", "--out", "imported"]);
    assert!(left.iter().all(|folder| !workspace.path(folder).exists()));
    assert!(workspace.path(".full.kiln-mine/notes").exists());
}
