//! `kiln check` on ranks that are processes: what all ranks must have in common, and what keeps ranks from connecting.

use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command};

use crate::check::assert_found;
use crate::support::{Ended, Workspace};

/// Returns a port on which no one listens.
fn free_port() -> String {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    listener.local_addr().expect("an address").port().to_string()
}

/// Starts one of two ranks, each on its own machine.
fn start(workspace: &Workspace, rank: &str, host: &str, port: &str, arguments: &[&str]) -> Child {
    start_command(workspace.command(arguments), rank, host, port)
}

fn start_command(mut command: Command, rank: &str, host: &str, port: &str) -> Child {
    let place = [("RANK", rank), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "1")];
    command.envs(place).env("MASTER_ADDR", host).env("MASTER_PORT", port).env_remove("KILN_JOB_SECRET");
    command.spawn().expect("the binary starts")
}

const CHECK: [&str; 4] = ["check", "run.toml", "--out", "run"];

/// Returns the output of rank 0 while rank 1 runs in another folder.
fn check(here: &Workspace, there: &Workspace, more: [&[&str]; 2]) -> Ended {
    let port = free_port();
    let [first, second] = more.map(|more| [&CHECK[..], more].concat());
    let second = start(there, "1", "127.0.0.1", &port, &second);
    let first = start(here, "0", "127.0.0.1", &port, &first);
    let (first, second) = (here.end(first), there.end(second));
    // Rank 0 reports for both ranks.
    assert_eq!((second.code, second.stdout.as_str()), (Some(0), ""), "{second:?}\n{first:?}");
    first
}

#[test]
fn a_launch_without_fault_passes() {
    let workspace = Workspace::new();
    let launch = ["launch", "--nproc-per-node", "3", "--log-dir", "logs", "--"];
    let more = ["--set", "train.global_batch=6"];
    let before = workspace.tree();
    let ended = workspace.kiln(&[&launch[..], &CHECK, &more].concat());
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{ended:?}");
    let expected = [
        "env    configuration  ranks 0-2  run.toml: 3 ranks",
        "data   training       ranks 0-2  1801 tokens",
        "comm   arguments      ranks 0-2  the same on all ranks",
        "comm   clock          ranks 0-2  within a second of rank 0's",
        "comm   data           ranks 0-2  the same on all ranks",
        "comm   run folder     ranks 1-2  rank 0's files in . are visible here",
        "step   step           ranks 0-2  this model, 6 made-up sequences of 8 tokens",
        "save   disk           rank 0     checkpoints take",
        "save   save           ranks 0-2  ",
    ];
    for line in expected {
        assert!(ended.stdout.contains(&format!("ok    {line}")), "{line}: {ended:?}");
    }
    for pair in ["0 - 1", "1 - 2", "2 - 0"] {
        let line = ended.stdout.lines().find(|line| line.contains(&format!("rank 0     {pair}: ")));
        assert!(line.is_some_and(|line| line.contains(" GB/s, on one machine")), "{pair}: {ended:?}");
    }
    let after: Vec<_> = workspace.tree().into_keys().filter(|path| !before.contains_key(path)).collect();
    assert!(after.iter().all(|path| path.starts_with(workspace.path("logs"))), "{after:?}");
}

#[test]
fn a_clock_that_is_wrong() {
    let workspace = Workspace::new();
    let fault = ["--fault", "clock=-90@start:0:1"];
    let ended = check(&workspace, &workspace, [&fault, &fault]);
    // The difference is as exact as the readings of the two clocks.
    let is_near = ["clock is 89.", "clock is 90."].iter().any(|near| ended.stdout.contains(near));
    assert!(is_near, "{ended:?}");
    assert_found(&ended, ["comm", "clock"], &["rank 1", " s behind rank 0's", "-> let a time service"]);
    let fault = ["--fault", "clock=5@start:0:1"];
    let ended = check(&workspace, &workspace, [&fault, &fault]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stdout.contains("warn  comm   clock"), "{ended:?}");
}

/// Two machines with separate folders where one shared folder was intended.
#[test]
fn folders_that_are_not_shared() {
    let (here, there) = (Workspace::new(), Workspace::new());
    let ended = check(&here, &there, [&[], &[]]);
    assert_found(
        &ended,
        ["comm", "run folder"],
        &[
            "rank 1",
            "a file that rank 0 has just written to . is not visible here",
            "-> use a folder that all machines share",
        ],
    );
    // The copies of the data are equal.
    assert!(
        ended.stdout.contains("ok    comm   data           ranks 0-1  the same on all ranks"),
        "{ended:?}"
    );
    assert!(ended.stdout.contains("skipped: needs comm"), "{ended:?}");
}

#[test]
fn data_and_checkpoints_that_differ() {
    let (here, there) = (Workspace::new(), Workspace::new());
    let mut other = crate::support::tokens(crate::support::TRAIN_TOKENS);
    other.swap(1000, 1001);
    assert_ne!(other[1000], other[1001]);
    there.write_data("data", &other);
    let ended = check(&here, &there, [&[], &[]]);
    assert_found(&ended, ["comm", "data"], &["rank 1", "differ from those of rank 0", "-> copy the folder"]);
    // One machine lacks the data.
    there.remove("data");
    let ended = check(&here, &there, [&[], &[]]);
    assert_found(&ended, ["data", "data"], &["rank 1 ", "data"]);
    // Each machine would prepare its own data, because they share no folder.
    let text = ["--set", "data.text=[\"text.txt\"]"];
    for workspace in [&here, &there] {
        workspace.write("text.txt", "some text");
    }
    let ended = check(&here, &there, [&text, &text]);
    assert_found(&ended, ["comm", "data"], &["rank 1 ", "differ from those of rank 0"]);
    assert_found(
        &ended,
        ["comm", "data folder"],
        &["rank 1 ", "is not visible here", "name one with data.path"],
    );
    for (workspace, seed) in [(&here, "1"), (&there, "2")] {
        workspace.write_data("data", &crate::support::tokens(crate::support::TRAIN_TOKENS));
        let seed = format!("train.seed={seed}");
        workspace.succeed(&["train", "run.toml", "--out", "first", "--set", "train.steps=1", "--set", &seed]);
    }
    let from = ["--set", "init.from=first"];
    let ended = check(&here, &there, [&from, &from]);
    assert_found(
        &ended,
        ["comm", "init.from"],
        &["rank 1", "would start from different weights than rank 0", "-> put the checkpoint"],
    );
}

#[test]
fn ranks_that_were_started_otherwise() {
    let workspace = Workspace::new();
    let ended = check(&workspace, &workspace, [&[], &["--set", "optim.lr=3e-4"]]);
    assert_found(&ended, ["comm", "arguments"], &["rank 1", "-> start every rank with the same command"]);
}

/// Only rank 1's disk is full: rank 0 can report only that rank 1 has failed; rank 1 reports the reason.
#[test]
fn a_save_that_fails_on_another_rank() {
    let workspace = Workspace::new();
    let port = free_port();
    let limit = ["-c", "trap '' XFSZ; ulimit -f 1; exec \"$0\" \"$@\"", crate::PROGRAM];
    let arguments = [&CHECK[..], &["--set", "comm.timeout_s=20"]].concat();
    let second = workspace.command_of(Path::new("sh"), &[&limit[..], &arguments].concat());
    let second = start_command(second, "1", "127.0.0.1", &port);
    let first = start(&workspace, "0", "127.0.0.1", &port, &arguments);
    let (first, second) = (workspace.end(first), workspace.end(second));
    assert_found(&first, ["save", "save"], &["rank 0 ", "another rank could not write"]);
    assert_eq!((second.code, second.stdout.as_str()), (Some(1), ""), "{second:?}");
    assert!(second.stderr.contains("fail  save   save  rank 1  "), "{second:?}");
    assert!(second.stderr.contains("File too large"), "{second:?}\n{first:?}");
}

/// Starts rank 0 alone, which must fail before it waits for the other rank.
fn alone(host: &str, port: &str, more: &[&str]) -> Ended {
    let workspace = Workspace::new();
    let child = start(&workspace, "0", host, port, &[&CHECK[..], more].concat());
    workspace.end(child)
}

#[test]
fn ports_that_are_taken() {
    let other = TcpListener::bind("127.0.0.1:0").expect("a port");
    let taken = other.local_addr().expect("an address").port().to_string();
    let ended = alone("127.0.0.1", &taken, &[]);
    let says = ["another process already listens on 127.0.0.1:", &taken, "choose another MASTER_PORT"];
    assert_found(&ended, ["env", "ports"], &says);
    assert!(ended.stdout.contains("skipped: needs a secret and a free port"), "{ended:?}");
    let ports = format!("comm.ports=\"{taken}\"");
    let ended = alone("127.0.0.1", &free_port(), &["--set", &ports]);
    assert_found(&ended, ["env", "ports"], &["taken: ", &taken]);
}

/// The address belongs to a documentation network, as if the machine were behind address translation.
#[test]
fn an_address_that_only_other_machines_know() {
    let ended = alone("192.0.2.1", &free_port(), &["--stage", "env", "--set", "comm.open=true"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stdout.contains("of each of its addresses"), "{ended:?}");
}

#[test]
fn a_secret_that_is_missing() {
    let ended = alone("0.0.0.0", &free_port(), &[]);
    assert_found(&ended, ["env", "secret"], &["has no secret", "-> Set KILN_JOB_SECRET"]);
}

#[test]
fn a_rank_that_does_not_come() {
    let ended = alone("127.0.0.1", &free_port(), &["--set", "comm.join_timeout_s=0.5"]);
    assert_found(&ended, ["comm", "meeting"], &["rank 1 did not come"]);
    assert!(ended.stdout.contains("skipped: needs comm"), "{ended:?}");
}

/// A rank dies while the other ranks compare themselves with it.
#[test]
fn a_rank_that_dies_meanwhile() {
    let workspace = Workspace::new();
    let launch = ["launch", "--nproc-per-node", "2", "--log-dir", "logs", "--"];
    let ended = workspace.kiln(&[&launch[..], &CHECK, &["--fault", "kill@start:0:1"]].concat());
    assert_found(&ended, ["comm", "meeting"], &["rank 0 ", "rank 1"]);
}

/// A problem that all ranks have is reported once, and the launcher exits with the code of the check.
#[test]
fn a_launch_with_a_fault() {
    let workspace = Workspace::new();
    let launch = ["launch", "--nproc-per-node", "2", "--log-dir", "logs", "--"];
    let ended = workspace.kiln(&[&launch[..], &CHECK, &["--set", "data.seq_len=5000"]].concat());
    assert_found(&ended, ["data", "training"], &["ranks 0-1", "data.seq_len = 5000"]);
    assert!(ended.stdout.contains("skipped: needs data"), "{ended:?}");
}

/// Without a stage in which ranks connect, the other ranks report no successes.
#[test]
fn a_launch_of_stages_without_a_meeting() {
    let workspace = Workspace::new();
    let launch = ["launch", "--nproc-per-node", "2", "--log-dir", "logs", "--"];
    let ended = workspace.kiln(&[&launch[..], &CHECK, &["--stage", "env,data"]].concat());
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{ended:?}");
    assert_eq!(ended.stdout.matches("data   training").count(), 1, "{ended:?}");
}
