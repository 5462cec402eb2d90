//! Repeating a step of a run gives the same bits and the same hashes.

use std::fs;

use kiln_testkit::run_to_end;

use crate::support::{Ended, Run, config, kiln};

/// A run with dropout and several micro-batches that keeps its checkpoints.
const LONGER: [&str; 14] = [
    "--set",
    "train.steps=200",
    "--set",
    "checkpoint.every=30",
    "--set",
    "checkpoint.keep=0",
    "--set",
    "model.dropout=0.1",
    "--set",
    "train.micro_batch=1",
    "--set",
    "log.every=1",
    "--hash",
    "steps=100",
];

fn replay(run: &Run, more: &[&str]) -> Ended {
    let out = run.out().display().to_string();
    run_to_end(&mut kiln([&["replay", &out][..], more].concat())).into()
}

/// Returns the hashes of step 100 in a folder.
fn hashes(folder: &std::path::Path) -> String {
    let text = fs::read_to_string(folder.join("hashes.jsonl")).expect("hashes");
    text.lines().find(|line| line.contains("\"step\":100")).expect("the step").to_owned()
}

#[test]
fn a_step_in_the_middle_is_taken_again_to_the_same_bits() {
    config();
    for as_processes in [false, true] {
        let run = Run::new();
        let ended = match as_processes {
            false => run.train_alone(2, &LONGER),
            true => run.launch(2, &[], &LONGER),
        };
        assert_eq!(ended.code, Some(0), "{ended:?}");
        let again = run.folder().join("again");
        let out = again.display().to_string();
        let ended = replay(&run, &["--step", "100", "--out", &out, "--hash", "steps=100"]);
        assert_eq!(ended.code, Some(0), "{ended:?}");
        assert!(ended.stdout.contains("from the checkpoint of step 90"), "{ended:?}");
        assert!(ended.stdout.contains(": bit for bit equal"), "{ended:?}");
        assert_eq!(hashes(&again), hashes(&run.out()));

        // No earlier checkpoint exists, so the replay starts from the beginning; and it has another number of ranks.
        let ended = replay(&run, &["--step", "3"]);
        assert_eq!(ended.code, Some(0), "{ended:?}");
        assert!(ended.stdout.contains("from the start"), "{ended:?}");
        assert!(ended.stdout.contains(": bit for bit equal"), "{ended:?}");
        let ended = replay(&run, &["--step", "95", "--ranks", "1"]);
        assert_eq!(ended.code, Some(0), "{ended:?}");
        assert!(ended.stdout.contains("equal up to rounding"), "{ended:?}");
    }
}

#[test]
fn a_step_that_comes_to_something_else_is_said() {
    let run = Run::new();
    config();
    let ended = run.train_alone(2, &[]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let ended = replay(&run, &["--step", "5", "--set", "optim.beta2=0.5"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stdout.contains(": different"), "{ended:?}");
    for (arguments, problem) in [
        (&["--step", "9"][..], "the run has 8 steps"),
        (&["--step", "0"], "0 is not in 1.."),
        (&["--step", "3", "--break", "sideways"], "is not a breakpoint"),
    ] {
        let ended = replay(&run, arguments);
        assert_eq!(ended.code, Some(2), "{ended:?}");
        assert!(ended.stderr.contains(problem), "{ended:?}");
    }
    let ended = Ended::from(run_to_end(&mut kiln(["replay", "/nowhere", "--step", "1"])));
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(ended.stderr.contains("is not a run folder"), "{ended:?}");
}
