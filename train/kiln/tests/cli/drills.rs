//! Fire drills with ranks as threads: every failure ends the run, names the rank and its activity, and leaves
//! flight recorders that agree.

use crate::support::{Ended, Workspace, names};

/// Runs one drill with a deadline of two seconds.
fn drill(workspace: &Workspace, fault: &str) -> Ended {
    let timeout = ["--set", "comm.timeout_s=2"];
    workspace.kiln(&[&["train", "run.toml", "--out", "run", "--fault", fault], &timeout[..]].concat())
}

/// Returns the output of `inspect flight` without times and process ids.
fn inspect(workspace: &Workspace, folder: &str) -> String {
    let text = workspace.succeed(&["inspect", "flight", folder]);
    let mut before = "";
    let words = text.split(' ').map(|word| {
        let time = word.parse::<f64>().is_ok() && (word.contains('.') || before == "for");
        let varies = time || before == "process";
        before = word;
        match word.trim_matches(|c: char| c.is_ascii_digit() || c == '.') {
            suffix if varies => format!("N{suffix}"),
            _ => word.to_owned(),
        }
    });
    words.collect::<Vec<_>>().join(" ")
}

#[test]
fn drills_end_with_the_rank_and_the_reason() {
    // The fault, the error message, and the verdict.
    for (fault, error, verdict) in [
        (
            "slow=5@backward:3:1",
            "timed out on rank 0 after 2s: rank 1 never entered #",
            "it has been in backward for",
        ),
        (
            "slow=5@data:3:0",
            "timed out on rank 1 after 2s: rank 0 never entered #",
            "it has been in data loading for",
        ),
        (
            "slow=5@checkpoint:4:1",
            "for \"save\" (checkpoint) timed out on rank 0 after 2s: rank 1 never entered #",
            "it has been in checkpoint for",
        ),
        (
            "slow=5@start:0:0",
            "all_gather 0 of group \"world\" for \"plan\" (init) timed out on rank 1",
            "rank 0 never entered #0 all_gather(plan); it has been in start for",
        ),
        ("skip@forward:2:1", "differs between ranks: rank 0 called all_gather of", "for \"layers.0\""),
        ("size@backward:2:0", "differs between ranks: rank 0 called", "differs between ranks"),
        ("skip@optimizer:2:1", "differs between ranks: rank 0 called all_reduce", "\"grad_norm\""),
        ("error@backward:2:1", "output has", "[invalid: output has"),
        ("error@data:2:0", "fault drill in data loading of step 2", "it has been in data loading for"),
        (
            "panic@backward:2:1",
            "rank 1 panicked: fault drill in backward of step 2",
            "it has been in a panic for",
        ),
    ] {
        let workspace = Workspace::new();
        let ended = drill(&workspace, fault);
        assert_eq!(ended.code, Some(1), "{fault}: {ended:?}");
        assert!(ended.stderr.contains(error), "{fault}: {}", ended.stderr);
        assert_eq!(names(&workspace.path("run/flight")), ["rank_0.json", "rank_1.json"], "{fault}");
        let said = workspace.succeed(&["inspect", "flight", "run"]);
        assert!(said.starts_with("verdict: ") && said.contains(verdict), "{fault}: {said}");
    }
}

#[test]
fn a_drill_in_threads_takes_the_whole_process() {
    let workspace = Workspace::new();
    let ended = drill(&workspace, "kill@optimizer:2:1");
    assert_eq!((ended.code, ended.stderr.as_str()), (None, ""));
    assert_eq!(workspace.steps("run").len(), 1);
}

#[test]
fn drills_that_do_not_come_up_change_nothing() {
    let workspace = Workspace::new();
    workspace.succeed(&["train", "run.toml", "--out", "plain"]);
    for fault in ["kill@backward:2:7", "kill@checkpoint:3:0", "kill@start!:0:1"] {
        let ended = drill(&workspace, fault);
        if fault.contains('!') {
            assert_eq!(ended.code, Some(2), "{ended:?}");
            continue;
        }
        assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{fault}");
        assert_eq!(workspace.steps("run"), workspace.steps("plain"));
        workspace.remove("run");
    }
}

#[test]
fn flights_are_read_from_either_folder_and_garbage_is_named() {
    let workspace = Workspace::new();
    drill(&workspace, "slow=5@forward:3:1");
    let both = inspect(&workspace, "run");
    insta::assert_snapshot!("flights", both);
    assert_eq!(inspect(&workspace, "run/flight"), both);

    // If the recorders lack the verdict that the ranks agreed on, `inspect` derives it again.
    let mut alone = workspace.json("run/flight/rank_0.json");
    alone["verdict"] = serde_json::Value::Null;
    alone["world_size"] = 4.into();
    workspace.write("run/flight/rank_0.json", alone.to_string());
    workspace.write("run/flight/rank_1.json", "{\"rank\": 1, ");
    workspace.write("run/flight/rank_2.json", alone.to_string());
    workspace.write("run/flight/notes.txt", "mine");
    insta::assert_snapshot!("flights_with_garbage", inspect(&workspace, "run"));

    workspace.remove("run/flight/rank_0.json");
    let mut ended = workspace.kiln(&["inspect", "flight", "run"]);
    assert_eq!(ended.code, Some(2));
    ended.stderr += &workspace.kiln(&["inspect", "flight", "data"]).stderr;
    ended.stderr += &workspace.kiln(&["inspect", "flight", "nowhere"]).stderr;
    insta::assert_snapshot!("no_flights", ended.stderr);
}

#[test]
fn a_new_start_moves_the_flights_of_the_one_that_failed_aside() {
    let workspace = Workspace::new();
    drill(&workspace, "error@data:1:0");
    assert!(workspace.path("run/flight").exists());
    workspace.remove("run/metrics.jsonl");
    workspace.succeed(&["train", "run.toml", "--out", "run"]);
    assert!(!workspace.path("run/flight").exists());
    let aside = workspace.path("run/flight-before-resume-1");
    assert_eq!(names(&aside), ["rank_0.json", "rank_1.json"]);
}
