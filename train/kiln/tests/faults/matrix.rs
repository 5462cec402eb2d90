//! Every fault in every part of a step: no rank hangs, the verdict names the right rank, nothing is left
//! behind, and the run resumes as if nothing had happened.

use std::time::{Duration, Instant};

use crate::support::{Ended, Run, STEPS, undisturbed};

const RANKS: usize = 3;

/// The rank that fails. Rank 0, which keeps the rendezvous, has a separate test.
const CULPRIT: usize = 1;

/// Deadline of every collective.
const TIMEOUT_S: u64 = 4;

/// Longest duration of two lives and a fault: start, deadline, inquiry, the launcher's patience, restart. No case
/// comes close, so only a hang exceeds it.
const LIMIT: Duration = Duration::from_secs(120);

/// The places at which faults occur, as a drill names them.
const PLACES: [&str; 5] = ["start:0", "forward:3", "backward:3", "optimizer:3", "checkpoint:4"];

/// A fault, and the messages expected from the other ranks or the launcher.
struct Fault {
    kind: &'static str,
    /// Text that some rank other than the culprit prints.
    verdict: &'static [&'static str],
    /// Text that the launcher prints.
    launcher: &'static [&'static str],
}

/// Names of collectives, one of which every verdict about a wait contains.
const OPERATIONS: [&str; 6] = ["all_gather", "reduce_scatter", "all_reduce", "broadcast", "barrier", "split"];

const FAULTS: [Fault; 6] = [
    Fault {
        kind: "kill",
        verdict: &["rank 1", "it died: its connection closed without a goodbye"],
        launcher: &["rank 1 ", "failed first: killed by SIGKILL"],
    },
    Fault {
        kind: "stop",
        verdict: &["rank 1 has not answered for ", "its process is stopped"],
        launcher: &["rank 1 "],
    },
    Fault { kind: "panic", verdict: &["aborted by rank 1", "panicked"], launcher: &["rank 1 "] },
    Fault { kind: "skip", verdict: &["differs between ranks", "rank 1 called"], launcher: &[] },
    Fault { kind: "size", verdict: &["differs between ranks", "rank 1 called"], launcher: &[] },
    Fault { kind: "slow=30", verdict: &["rank 1 never entered #", "; ranks 0, 2 wait"], launcher: &[] },
];

fn drill(fault: &Fault, place: &str, culprit: usize) {
    let case = format!("{}@{place}:{culprit}", fault.kind);
    eprintln!("{case}");
    let run = Run::new();
    let timeout = format!("comm.timeout_s={TIMEOUT_S}");
    let started = Instant::now();
    let ended = run.launch(RANKS, &["--max-restarts", "1"], &["--set", &timeout, "--fault", &case]);
    assert!(started.elapsed() < LIMIT, "{case} took {:?}", started.elapsed());
    assert_eq!(ended.code, Some(0), "{case}: {ended:?}\n{:#?}", run.logs(RANKS, 0));
    let name = |text: &str| text.replace("rank 1", &format!("rank {culprit}"));
    check_words(&run, fault, &case, &ended, name, culprit);
    assert_eq!(run.orphans(), Vec::<String>::new(), "{case}");
    let checkpoints = run.check_checkpoints();
    assert_eq!(checkpoints.last(), Some(&STEPS), "{case}");
    assert_eq!(run.losses(), undisturbed(RANKS), "{case}");
}

/// Checks that the other ranks name the culprit and the operation, and that the launcher names the culprit too.
fn check_words(
    run: &Run,
    fault: &Fault,
    case: &str,
    ended: &Ended,
    name: impl Fn(&str) -> String,
    culprit: usize,
) {
    let logs = run.logs(RANKS, 0);
    let mut others = logs.iter().enumerate().filter(|(rank, _)| *rank != culprit);
    let says_so = |log: &str| {
        fault.verdict.iter().all(|words| log.contains(&name(words)))
            && OPERATIONS.iter().any(|operation| log.contains(operation))
    };
    assert!(others.any(|(_, log)| says_so(log)), "{case}: no log contains {:?}\n{logs:#?}", fault.verdict);
    for words in fault.launcher {
        assert!(ended.stderr.contains(&name(words)), "{case}: {}", ended.stderr);
    }
}

#[test]
fn a_rank_is_killed_and_the_job_comes_back() {
    drill(&FAULTS[0], "backward:3", CULPRIT);
}

#[test]
fn a_rank_is_stopped_and_the_job_comes_back() {
    drill(&FAULTS[1], "forward:3", CULPRIT);
}

#[test]
fn a_collective_is_left_out_and_the_job_comes_back() {
    drill(&FAULTS[3], "forward:3", CULPRIT);
}

#[test]
#[ignore = "takes minutes: cargo test --release -p kiln --test faults -- --ignored matrix"]
fn matrix() {
    for fault in &FAULTS {
        for place in PLACES {
            drill(fault, place, CULPRIT);
        }
    }
}

/// If rank 0 fails, the rendezvous is gone too.
#[test]
#[ignore = "takes minutes: cargo test --release -p kiln --test faults -- --ignored matrix"]
fn matrix_of_rank_0() {
    let killed = Fault {
        kind: "kill",
        verdict: &["rank 1", "it died: the rendezvous, which it keeps, closed"],
        launcher: FAULTS[0].launcher,
    };
    let stopped = Fault {
        kind: "stop",
        verdict: &["rank 1, which keeps the rendezvous, has not answered for "],
        launcher: &["rank 1 "],
    };
    let panicked =
        Fault { kind: "panic", verdict: &["aborted by rank 1", "panicked"], launcher: &["rank 1 "] };
    for fault in [killed, stopped, panicked] {
        for place in PLACES {
            drill(&fault, place, 0);
        }
    }
}
