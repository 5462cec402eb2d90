//! Ownership of a run folder: when it is refused, who holds it, and the fate of earlier files. Restarted jobs
//! are in `restarts`.

use std::process::Child;

use kiln_testkit::{status_of, wait_until};
use rustix::process::Signal;
use serde_json::Value as Json;

use crate::messages::Messages;
use crate::support::{Ended, Workspace, names, signal};

/// A run that continues until it is stopped, or for some minutes.
pub const FOREVER: [&str; 4] = ["train", "run.toml", "--set", "train.steps=200000"];

pub fn in_run<'a>(arguments: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    [arguments, &["--out", "run"], more].concat()
}

pub fn wait_for_a_step(workspace: &Workspace, out: &str) {
    let metrics = workspace.path(out).join("metrics.jsonl");
    let logged = || std::fs::read_to_string(&metrics).is_ok_and(|text| text.contains("\"loss\""));
    wait_until("a step", logged);
}

/// Ends the endless run in `run`, which must end without an error.
pub fn stop(workspace: &Workspace, run: Child) {
    wait_until("its start", || {
        let holder = std::fs::read_to_string(workspace.path("run/.kiln/holder.json"));
        let holder = holder.ok().and_then(|text| serde_json::from_str::<Json>(&text).ok());
        holder.is_some_and(|holder| holder["process"]["pid"] == run.id())
    });
    signal(&run, Signal::USR1);
    let ended = workspace.end(run);
    assert_eq!(ended.code, Some(75), "{ended:?}");
}

pub fn assert_refused(ended: &Ended, says: &[&str]) {
    assert_eq!(ended.code, Some(2), "{ended:?}");
    for part in says {
        assert!(ended.stderr.contains(part), "{part}: {ended:?}");
    }
}

#[test]
fn a_folder_that_holds_no_run_is_left_alone() {
    let mut messages = Messages::default();
    let workspace = Workspace::new();
    for file in ["flight/black_box", "flight/rank_0.json", "config.toml", "config.partial"] {
        workspace.write(&format!("mine/{file}"), "mine");
    }
    workspace.write("logs_of_mine/logs/notes.txt", "mine");
    workspace.write("other/run.json", "{ \"run\": 7 }");
    for out in ["mine", "logs_of_mine", "other"] {
        messages.refused(out, &workspace, &["train", "run.toml", "--out", out]);
    }
    insta::assert_snapshot!(messages.finish());
    let before = workspace.tree();
    let launch = ["launch", "--nproc-per-node", "2", "--", "train", "run.toml", "--out", "mine"];
    assert_refused(&workspace.kiln(&launch), &["holds no run of Kiln"]);
    let mine = workspace.path("mine");
    let after = workspace.tree().into_iter().filter(|(path, _)| path.starts_with(&mine));
    assert!(after.eq(before.into_iter().filter(|(path, _)| path.starts_with(&mine))));
    // Logs that exist before the run were written by its launcher.
    workspace.write("run/logs/rank_0.restart_0.stdout.log", "");
    workspace.succeed(&["train", "run.toml", "--out", "run"]);
}

/// The first run prepares the data in its folder, and the second finds it.
#[test]
fn data_may_be_in_the_run_folder() {
    let workspace = Workspace::new();
    workspace.write("text.txt", "some text, and some more of it\n".repeat(100));
    let own = [("data.path", "'run/data'"), ("data.text", "['text.txt']")];
    workspace.config("run.toml", &[&own[..], &[("data.vocab_size", "260")]].concat());
    workspace.succeed(&["train", "run.toml", "--out", "run"]);
    workspace.copy("run/data", "other/data");
    workspace.succeed(&["train", "run.toml", "--out", "other", "--set", "data.path=other/data"]);
}

#[test]
fn of_a_run_only_names_of_ours_are_touched() {
    let workspace = Workspace::new();
    workspace.succeed(&["train", "run.toml", "--out", "run", "--set", "train.steps=2"]);
    let mine = ["config.partial", "metrics.partial", "flight/notes.txt", "superseded-1/mine"];
    for file in mine {
        workspace.write(&format!("run/{file}"), "mine");
    }
    workspace.write("run/checkpoints/.fsdp_cptmine.partial/mine", "mine");
    workspace.write("run/flight/rank_0.json", "of the life before");
    workspace.succeed(&["train", "run.toml", "--out", "run", "--resume", "latest"]);
    for file in mine {
        assert_eq!(workspace.text(format!("run/{file}")), "mine", "{file}");
    }
    assert_eq!(workspace.text("run/checkpoints/.fsdp_cptmine.partial/mine"), "mine");
    assert_eq!(names(&workspace.path("run/flight")), ["notes.txt"]);
    assert_eq!(workspace.text("run/flight-before-resume-1/rank_0.json"), "of the life before");
}

#[test]
fn of_two_starts_in_one_folder_one_goes_on_and_the_other_names_it() {
    let workspace = Workspace::new();
    let start = || workspace.start(&in_run(&FOREVER, &["--set", "checkpoint.every=1"]));
    let mut starts = [start(), start()];
    let mut first = None;
    wait_until("one of them", || {
        let ended = |start: &mut Child| start.try_wait().expect("its state").is_some();
        first = starts.iter_mut().position(ended);
        first.is_some()
    });
    let [a, b] = starts;
    let (loser, winner) = if first == Some(0) { (a, b) } else { (b, a) };
    let pid = format!("pid {}, since 2", winner.id());
    assert_refused(&workspace.end(loser), &["run is in use by a run on host ", &pid]);
    wait_for_a_step(&workspace, "run");
    // Every later run is refused, whatever its arguments.
    let run = ["train", "run.toml"];
    for more in [&[][..], &["--resume", "latest"]] {
        assert_refused(&workspace.kiln(&in_run(&run, more)), &["run is in use by", &pid]);
    }
    stop(&workspace, winner);
    let said = workspace.succeed(&["inspect", "--verify", "run"]);
    assert!(said.contains("all checksums match"), "{said}");
}

#[test]
fn latest_is_the_run_that_was_interrupted_last() {
    let workspace = Workspace::new();
    workspace.config("run.toml", &[("train.steps", "3"), ("checkpoint.every", "1")]);
    let said = workspace.succeed(&["train", "run.toml"]);
    assert!(!said.contains("earlier run"), "{said}");
    let failed = workspace.kiln(&["train", "run.toml", "--fault", "nan@backward:3:0"]);
    assert_eq!(failed.code, Some(1), "{failed:?}");
    let said = workspace.succeed(&["train", "run.toml"]);
    let first = said.lines().next().unwrap_or_default();
    assert_eq!(first, "runs/run holds an earlier run: this run goes to runs/run-3");

    let listed = workspace.kiln(&["status", "runs"]);
    assert_eq!(listed.code, Some(1), "{listed:?}");
    let heads =
        ["run runs/run: step 3 of 3, ", "run runs/run-2: step 2 of 3, ", "run runs/run-3: step 3 of 3, "];
    let lines: Vec<_> = listed.stdout.lines().filter(|line| line.starts_with("run ")).collect();
    assert_eq!(lines.len(), 3, "{listed:?}");
    for (line, head) in lines.into_iter().zip(heads) {
        assert!(line.starts_with(head), "{line}");
    }
    assert_refused(&workspace.kiln(&["status", "runs", "--follow"]), &["runs is a folder of runs"]);

    let said = workspace.succeed(&["train", "run.toml", "--resume", "latest"]);
    assert!(said.contains("resuming from runs/run-2/checkpoints/fsdp_cpt2\n"), "{said}");
    // Now all are complete: the last one continues, with its own configuration and this change.
    let more = ["train", "--resume", "runs/run-3/checkpoints/fsdp_cpt3", "--set", "train.steps=4"];
    workspace.succeed(&more);
    assert_eq!(workspace.steps("runs/run-3").len(), 4);

    for (arguments, says) in [
        (&["train"][..], "CONFIG"),
        (&["train", "--resume", "latest"], "--resume latest needs CONFIG"),
        (&["train", "--resume", "nowhere"], "nowhere"),
    ] {
        assert_refused(&workspace.kiln(arguments), &[says]);
    }
}

#[test]
fn two_starts_without_a_folder_take_one_each() {
    let workspace = Workspace::new();
    let starts = [workspace.start(&FOREVER), workspace.start(&FOREVER)];
    for out in ["runs/run", "runs/run-2"] {
        wait_for_a_step(&workspace, out);
    }
    for run in starts {
        signal(&run, Signal::USR1);
        assert_eq!(workspace.end(run).code, Some(75));
    }
    assert_eq!(names(&workspace.path("runs")), ["run", "run-2"]);
}

#[test]
fn a_run_that_was_killed_holds_nothing() {
    let workspace = Workspace::new();
    let mut killed = workspace.start(&in_run(&FOREVER, &["--set", "checkpoint.every=1"]));
    wait_until("a checkpoint", || workspace.path("run/checkpoints/latest").exists());
    killed.kill().expect("a signal");
    status_of(&mut killed);
    let run = workspace.start(&in_run(&FOREVER, &["--resume", "latest"]));
    stop(&workspace, run);
}

/// As on a file system whose locks do not reach other machines.
#[test]
fn a_holder_on_another_machine_is_known_by_its_heartbeat() {
    let workspace = Workspace::new();
    workspace.succeed(&["train", "run.toml", "--out", "run", "--set", "train.steps=2"]);
    let mut holder = workspace.json("run/.kiln/holder.json");
    assert_eq!(holder["ended"], true);
    holder["ended"] = false.into();
    holder["process"]["host"] = "elsewhere".into();
    holder["process"]["boot"] = "another".into();
    let resume = ["train", "run.toml", "--out", "run", "--resume", "latest"];
    let mut number = 0;
    let mut beat = || {
        number += 1;
        holder["beat"] = number.into();
        // Written by a rename, so that no reader sees a partial file.
        workspace.write("beat", holder.to_string());
        let to = workspace.path("run/.kiln/holder.json");
        std::fs::rename(workspace.path("beat"), to).expect("a file");
    };
    beat();
    let mut start = workspace.start(&resume);
    wait_until("an end", || {
        beat();
        start.try_wait().expect("its state").is_some()
    });
    let ended = workspace.end(start);
    assert_refused(&ended, &["run is in use by a run on host elsewhere, pid "]);
    assert!(ended.stdout.contains("watching for 20 s to see whether it still runs"), "{ended:?}");
    // The holder reports its end.
    holder["ended"] = true.into();
    workspace.write("run/.kiln/holder.json", holder.to_string());
    workspace.succeed(&resume);
}

#[test]
fn a_run_says_who_it_is() {
    let workspace = Workspace::new();
    let read = |out: &str| workspace.json(format!("{out}/run.json"));
    workspace.succeed(&["train", "run.toml", "--out", "run", "--set", "train.steps=2"]);
    let first = read("run");
    assert_eq!(first["kiln_run"], 1);
    assert_eq!(first["kiln"], env!("CARGO_PKG_VERSION"));
    assert_eq!(first["id"].as_str().map(str::len), Some(32));
    assert_eq!(first["config_sha256"].as_str().map(str::len), Some(64));
    assert!(first["created"].as_str().is_some_and(|time| time.ends_with('Z')));
    assert!(first["job"].is_null());
    workspace.succeed(&["train", "run.toml", "--out", "run", "--resume", "latest"]);
    let second = read("run");
    assert_eq!((&first["id"], &first["created"]), (&second["id"], &second["created"]));
    assert_ne!(first["config_sha256"], second["config_sha256"]);
    workspace.succeed(&["train", "run.toml", "--out", "other"]);
    assert_ne!(read("other")["id"], first["id"]);
    // A run of an older build gets an identity when it resumes.
    workspace.remove("run/run.json");
    workspace.remove("run/.kiln");
    assert_refused(&workspace.kiln(&["train", "run.toml", "--out", "run"]), &["already holds a run"]);
    workspace.succeed(&["train", "run.toml", "--out", "run", "--resume", "latest"]);
    assert_ne!(read("run")["id"], first["id"]);
}

#[test]
fn going_back_moves_what_comes_later_aside() {
    let workspace = Workspace::new();
    // The learning rate of a step must not depend on the number of steps.
    let constant = ("optim.schedule", "'constant'");
    workspace.config("run.toml", &[("train.steps", "6"), ("checkpoint.every", "2"), constant]);
    workspace.succeed(&["train", "run.toml", "--out", "run"]);
    let (steps, before) = (workspace.steps("run"), workspace.tree());
    let metrics = workspace.text("run/metrics.jsonl");
    let back = |steps: &'static str| {
        let from = ["--resume", "run/checkpoints/fsdp_cpt2", "--set", steps];
        workspace.kiln(&[&["train", "run.toml", "--out", "run"], &from[..]].concat())
    };
    let ended = back("train.steps=4");
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{ended:?}");
    let said = "going back to step 2: checkpoints of later steps (4, 6) and their metrics are now in \
                run/superseded-1\n";
    assert!(ended.stdout.contains(said), "{ended:?}");
    assert_eq!(workspace.checkpoints("run"), ["fsdp_cpt2", "fsdp_cpt4", "latest"]);
    assert_eq!(workspace.steps("run"), steps[..4]);
    assert_eq!(workspace.steps("run/superseded-1"), steps[2..]);
    assert_eq!(workspace.checkpoints("run/superseded-1"), ["fsdp_cpt4", "fsdp_cpt6"]);
    let after = workspace.tree();
    for (path, content) in &before {
        if let Ok(inside) = path.strip_prefix(workspace.path("run/checkpoints"))
            && !inside.starts_with("fsdp_cpt2")
            && !inside.starts_with("latest")
        {
            let now = after.get(&workspace.path("run/superseded-1/checkpoints").join(inside));
            assert!(now == Some(content), "{}", inside.display());
        }
    }
    // The moved checkpoints are complete, and a separate run can resume from them.
    workspace.succeed(&["inspect", "--verify", "run/superseded-1"]);
    let on = ["train", "run.toml", "--out", "on", "--resume", "run/superseded-1"];
    workspace.succeed(&[&on[..], &["--set", "train.steps=7"]].concat());
    assert_eq!(workspace.steps("on").len(), 1);
    // Going back again leaves the first ones where they are.
    assert_eq!(back("train.steps=3").code, Some(0));
    assert_eq!(workspace.checkpoints("run/superseded-1"), ["fsdp_cpt4", "fsdp_cpt6"]);
    assert_eq!(workspace.checkpoints("run/superseded-2"), ["fsdp_cpt4"]);
    assert_eq!(workspace.checkpoints("run"), ["fsdp_cpt2", "fsdp_cpt3", "latest"]);
    let all: Vec<_> = ["superseded-1", "superseded-2"]
        .map(|folder| workspace.text(format!("run/{folder}/metrics.jsonl")))
        .concat()
        .lines()
        .map(str::to_owned)
        .collect();
    assert!(metrics.lines().skip(2).all(|line| all.iter().any(|kept| kept == line)));
}

/// A failed attempt changes nothing.
#[test]
fn going_back_to_a_damaged_checkpoint_moves_nothing() {
    let workspace = Workspace::new();
    workspace.config("run.toml", &[("checkpoint.every", "2")]);
    workspace.succeed(&["train", "run.toml", "--out", "run"]);
    let weights = "run/checkpoints/fsdp_cpt2/model-part-00001-of-00002.safetensors";
    workspace.write(weights, "damaged");
    let (checkpoints, metrics) = (workspace.checkpoints("run"), workspace.metrics("run"));
    let from = ["--out", "run", "--resume", "run/checkpoints/fsdp_cpt2"];
    let ended = workspace.kiln(&[&["train", "run.toml"], &from[..]].concat());
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert_eq!(workspace.checkpoints("run"), checkpoints);
    assert_eq!(workspace.metrics("run"), metrics);
    assert!(!workspace.path("run/superseded-1").exists());
}

/// Lines of steps after the last checkpoint are logged again; the truncated lines are kept nevertheless.
#[test]
fn an_ordinary_resume_keeps_the_lines_it_cuts() {
    let workspace = Workspace::new();
    workspace.succeed(&["train", "run.toml", "--out", "run", "--set", "train.steps=2"]);
    let further = "{\"step\":3,\"loss\":1.5}\n";
    workspace.write("run/metrics.jsonl", workspace.text("run/metrics.jsonl") + further);
    workspace.succeed(&["train", "run.toml", "--out", "run", "--resume", "latest"]);
    assert_eq!(workspace.text("run/metrics-superseded.jsonl"), further);
    assert_eq!(workspace.steps("run").len(), 4);
    assert!(!workspace.path("run/superseded-1").exists());
}

#[test]
fn another_position_in_the_data_is_refused_unless_it_is_wanted() {
    let mut messages = Messages::default();
    let workspace = Workspace::new();
    workspace.write("text.txt", "some text, and some more of it\n".repeat(100));
    workspace.write("more.txt", "another text, and some more of it\n".repeat(100));
    for (text, out) in [("text.txt", "one"), ("more.txt", "two")] {
        let tokenizer = ["--tokenizer", "data/tokenizer.json"];
        let prepare = ["data", "prepare", "--input", text, "--out", out];
        workspace.succeed(&[&prepare[..], &tokenizer].concat());
    }
    workspace.config("run.toml", &[("data.path", "'one'"), ("checkpoint.every", "2")]);
    workspace.succeed(&["train", "run.toml", "--out", "run", "--set", "train.steps=2"]);
    let resume = ["train", "run.toml", "--out", "run", "--resume", "latest"];
    let changes = [
        ("data.seq_len", "data.seq_len=4"),
        ("data.shuffle", "data.shuffle=false"),
        ("train.seed", "train.seed=9"),
        ("data", "data.path=two"),
    ];
    for (key, change) in changes {
        messages.refused(key, &workspace, &[&resume[..], &["--set", change]].concat());
    }
    let all: Vec<&str> = changes.iter().flat_map(|(_, change)| ["--set", *change]).collect();
    let some = ["--allow-changed", "data.seq_len", "--allow-changed", "data"];
    messages.refused("not all allowed", &workspace, &[&resume[..], &all, &some].concat());
    let wrong = ["--allow-changed", "optim.lr"];
    let ended = workspace.kiln(&[&resume[..], &wrong].concat());
    assert_refused(&ended, &["data.seq_len, data.shuffle, train.seed, data"]);
    insta::assert_snapshot!(messages.finish());

    let allowed: Vec<&str> = changes.iter().flat_map(|(key, _)| ["--allow-changed", *key]).collect();
    let said = workspace.succeed(&[&resume[..], &all, &allowed].concat());
    let line = "reading the data at a different position, as allowed: data.seq_len was 8 and is 4 now, ";
    assert!(said.contains(line), "{said}");
    assert_eq!(workspace.steps("run").len(), 4);
    // The batch size changes no position, and unchanged values are not mentioned.
    let batch = ["--set", "train.global_batch=4", "--set", "train.steps=6"];
    workspace.succeed(&[&resume[..], &all, &batch].concat());
}
