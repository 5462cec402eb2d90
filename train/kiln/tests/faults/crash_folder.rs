//! The files that a crash leaves in the run folder, for every kind of crash and every phase.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use crate::support::{Ended, Run, config};

/// Phases of a step, as named in the drill and in the report.
const PHASES: [(&str, &str); 4] =
    [("data", "data loading"), ("forward", "forward"), ("backward", "backward"), ("optimizer", "optimizer")];

/// Kinds of crashes, their names in the report, and a function on the call stack.
const KINDS: [(&str, &str, &str); 7] = [
    ("segv", "SIGSEGV", "kiln_train::run::trainer::"),
    ("bus", "SIGBUS (address 0x", "kiln_sys::drills::read_beyond_a_file"),
    ("overflow", "SIGSEGV (address 0x", "kiln_sys::drills::"),
    ("abort", "SIGABRT", "kiln_train::run::trainer::"),
    ("panic", "a panic at ", "kiln_train::run::trainer::"),
    ("worker", "a panic at ", "panic_in_a_thread"),
    ("memory=1KiB", "out of memory: rank ", "kiln_shard::memory"),
];

/// The form in which the ranks run: threads or processes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Ranks {
    Threads,
    Processes,
}

/// Makes a rank crash in step 3, and checks the files it leaves.
fn crash((kind, what, call): (&str, &str, &str), phase: (&str, &str), rank: usize, ranks: Ranks) {
    let fault = format!("{kind}@{}:3:{rank}", phase.0);
    let case = format!("{fault} {ranks:?}");
    let run = Run::new();
    let ended = match ranks {
        Ranks::Threads => run.train_alone(2, &["--fault", &fault]),
        Ranks::Processes => run.launch(2, &[], &["--fault", &fault]),
    };
    assert_ne!(ended.code, Some(0), "{case}: {ended:?}");
    let is_memory = kind.starts_with("memory");
    // A limit on memory applies to the whole process: another of its ranks may exceed the limit first, or this
    // rank a little later.
    let folders = names(&run.out().join("crash"));
    let own = format!("rank_{rank}");
    match folders.first() {
        Some(first) if is_memory && ranks == Ranks::Threads => check(&run, first, &ended, &case, what, call),
        _ => {
            assert_eq!(folders, [&*own], "{case}: {ended:?}");
            let text = check(&run, &own, &ended, &case, what, call);
            let line = format!("phase    {}", phase.1);
            assert!(is_memory || text.lines().any(|found| found == line), "{case}: {text}");
            text
        }
    };
    assert_eq!(run.orphans(), Vec::<String>::new(), "{case}");
}

/// Checks the folder `name` of a crash in step 3; returns its text.
fn check(run: &Run, name: &str, ended: &Ended, case: &str, what: &str, call: &str) -> String {
    let folder = run.out().join("crash").join(name);
    let known = format!("crash report: {}", folder.display());
    assert!(ended.stderr.contains(&known), "{case}: {ended:?}");
    let text = fs::read_to_string(folder.join("crash.txt")).unwrap_or_default();
    let value = |key: &str| {
        let line = text.lines().find(|line| line.split(' ').next() == Some(key));
        line.unwrap_or_else(|| panic!("{case}: no {key}: {text}"))[9..].to_owned()
    };
    let rank: usize = name.trim_start_matches("rank_").parse().expect("a rank");
    assert!(value("what").starts_with(what), "{case}: {text}");
    // A limit on memory takes effect at an allocation, which may be in the next step.
    let latest = if what.starts_with("out of memory") { 4 } else { 3 };
    let step: u64 = value("step").parse().expect("a step");
    assert!(value("rank") == rank.to_string() && (3..=latest).contains(&step), "{case}: {text}");
    let module = value("module").split(',').next().unwrap_or_default().to_owned();
    assert!(["embed", "layers.0", "layers.1", "head"].contains(&&*module), "{case}: {module}: {text}");
    for key in ["phase", "call", "host", "process", "time", "version"] {
        assert!(!value(key).is_empty(), "{case}: {key}: {text}");
    }
    assert!(text.contains(call), "{case}: no {call}: {text}");
    let json = |name: &str| -> serde_json::Value {
        let text = fs::read_to_string(folder.join(name)).unwrap_or_default();
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{case}: {name}: {error}: {text}"))
    };
    let (batch, flight) = (json("batch.json"), json("flight.json"));
    assert_eq!((&batch["rank"], &batch["step"]), (&rank.into(), &step.into()), "{case}: {batch}");
    // A step has 12 samples, and a micro-batch has one.
    let samples = [&batch["first_sample"], &batch["last_sample"]].map(|sample| sample.as_u64().unwrap_or(0));
    assert!(samples[0] == samples[1] && (24..12 * latest).contains(&samples[0]), "{case}: {batch}");
    assert_eq!(flight["rank"], rank, "{case}");
    assert!(flight["records"].as_array().is_some_and(|records| !records.is_empty()), "{case}");
    text
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let names: BTreeSet<_> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.into_iter().collect()
}

#[test]
fn crashes_of_processes_leave_what_is_known() {
    config();
    for (index, kind) in KINDS.into_iter().enumerate() {
        crash(kind, PHASES[index % PHASES.len()], index % 2, Ranks::Processes);
    }
}

#[test]
fn crashes_of_threads_leave_what_is_known() {
    config();
    for (index, kind) in KINDS.into_iter().enumerate() {
        crash(kind, PHASES[(index + 1) % PHASES.len()], (index + 1) % 2, Ranks::Threads);
    }
}

/// A killed process cannot write anything, so its launcher writes what it has observed.
#[test]
fn a_rank_that_is_killed_has_a_folder_too() {
    config();
    let run = Run::new();
    let ended = run.launch(2, &[], &["--fault", "kill@backward:3:1"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let folder = run.out().join("crash/rank_1");
    assert_eq!(names(&run.out().join("crash")), ["rank_1"], "{ended:?}");
    assert!(ended.stderr.contains(&format!("crash report: {}", folder.display())), "{ended:?}");
    let text = fs::read_to_string(folder.join("crash.txt")).expect("a report");
    assert!(text.starts_with("what     SIGKILL (9), reported by its launcher"), "{text}");
    for line in ["rank     1", "step     3"] {
        assert!(text.lines().any(|found| found == line), "{line}: {text}");
    }
    let batch = fs::read_to_string(folder.join("batch.json")).expect("the samples");
    assert!(batch.starts_with(r#"{"rank":1,"step":3,"micro_batch":0,"first_sample":30,"#), "{batch}");
}

/// Each life that crashes has its own folder, and no later life removes it.
#[test]
fn a_crash_of_a_later_life_takes_nothing_from_an_earlier_one() {
    config();
    let run = Run::new();
    let train = ["--fault", "segv!@backward:3:1", "--set", "checkpoint.async=false"];
    let ended = run.launch(2, &["--max-restarts", "1"], &train);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert_eq!(names(&run.out().join("crash")), ["rank_1", "rank_1-2"], "{ended:?}");
    for folder in ["rank_1", "rank_1-2"] {
        let text = fs::read_to_string(run.out().join("crash").join(folder).join("crash.txt"));
        let text = text.expect("a report");
        assert_eq!(text.lines().filter(|line| line.starts_with("what ")).count(), 1, "{text}");
    }
}

#[test]
#[ignore = "takes minutes: cargo test --release -p kiln --test faults -- --ignored sixteen"]
fn sixteen_of_each_kind() {
    config();
    for kind in KINDS {
        for phase in PHASES {
            for (rank, ranks) in
                [(0, Ranks::Threads), (1, Ranks::Threads), (0, Ranks::Processes), (1, Ranks::Processes)]
            {
                crash(kind, phase, rank, ranks);
            }
        }
    }
}
