//! A program that calls the library: it gets a warning if it does not set up its process, and a process that
//! cannot know its rank starts nothing.

use std::process::Command;

use kiln::run::{RunOptions, train};
use kiln_testkit::run_to_end;

use crate::support::{Ended, Workspace};

/// Variables for the program below: the parent of its run folder, and whether it sets itself up.
const FOLDER: &str = "KILN_TEST_FOLDER";
const START: &str = "KILN_TEST_START";

/// Not a test by itself: the tests below start it as a program.
#[test]
#[ignore = "a program for other tests"]
fn program() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    std::env::set_current_dir(folder).expect("a folder");
    let how = std::env::var(START).expect("how to start");
    let options = match how.as_str() {
        "started" => RunOptions::from_environment(),
        how => Ok(RunOptions { alone: how == "alone", ..RunOptions::default() }),
    };
    let config = kiln::config::load("run.toml".as_ref(), &[]).expect("a configuration");
    let out = std::path::PathBuf::from("run").into();
    let place = options.as_ref().is_ok_and(|options| options.place.is_some());
    match options.and_then(|options| train(config, &RunOptions { out, place: None, ..options })) {
        Ok(summary) => println!("place {place}, {} steps", summary.steps),
        Err(error) => println!("place {place}, usage {}: {error}", error.is_usage()),
    }
}

fn start(workspace: &Workspace, how: &str, variables: &[(&str, &str)]) -> Ended {
    let mut program = Command::new(std::env::current_exe().expect("this program"));
    program
        .args(["--exact", "surroundings::program", "--ignored", "--nocapture", "--quiet"])
        .env(FOLDER, workspace.path(""))
        .env(START, how)
        .envs(variables.iter().copied());
    let output = run_to_end(&mut program);
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    Ended { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

/// Variables of torchrun for the second of two ranks.
const TORCHRUN: [(&str, &str); 6] = [
    ("RANK", "1"),
    ("WORLD_SIZE", "2"),
    ("LOCAL_RANK", "1"),
    ("LOCAL_WORLD_SIZE", "2"),
    ("MASTER_ADDR", "127.0.0.1"),
    ("MASTER_PORT", "29500"),
];

/// Variables of srun for the second of two tasks.
const SLURM: [(&str, &str); 8] = [
    ("SLURM_JOB_ID", "7"),
    ("SLURM_STEP_ID", "0"),
    ("SLURM_PROCID", "1"),
    ("SLURM_NTASKS", "2"),
    ("SLURM_LOCALID", "1"),
    ("SLURM_NODEID", "0"),
    ("SLURM_NNODES", "1"),
    ("SLURM_STEP_NODELIST", "node1"),
];

#[test]
fn a_rank_that_does_not_know_its_place_is_refused() {
    for (variables, who) in [(&TORCHRUN[..], "torchrun"), (&SLURM[..], "Slurm")] {
        let workspace = Workspace::new();
        for how in ["bare", "started"] {
            let ended = start(&workspace, how, variables);
            let expected = format!("{who} has started this process as one of 2 ranks, and each of");
            assert!(ended.stdout.contains(&expected), "{ended:?}");
            assert!(ended.stdout.contains(&format!("place {}, usage true", how == "started")));
            assert!(ended.stdout.contains("RunOptions::from_environment"), "{ended:?}");
            assert!(!workspace.path("run").exists(), "nothing was begun");
        }
        let ended = start(&workspace, "alone", variables);
        assert!(ended.stdout.contains("place false, 4 steps"), "{ended:?}");
    }
}

#[test]
fn what_a_program_lacks_is_said_once() {
    let workspace = Workspace::new();
    let ended = start(&workspace, "bare", &[]);
    assert!(ended.stdout.contains("4 steps"), "{ended:?}");
    let warned: Vec<_> = ended.stderr.lines().filter(|l| l.starts_with("warning: ")).collect();
    assert_eq!(warned.len(), 1, "{ended:?}");
    for part in ["no tracing subscriber", "SIGTERM ends this run", "peak_bytes is 0"] {
        assert!(warned[0].contains(part), "{ended:?}");
    }
    assert!(warned[0].contains("call kiln::process::start first in main"), "{ended:?}");

    // The program sets up everything that a call can; only the allocator is missing, which is a warning like others.
    workspace.remove("run");
    let ended = start(&workspace, "started", &[]);
    assert!(ended.stdout.contains("4 steps"), "{ended:?}");
    assert!(ended.stderr.contains("WARN"), "{ended:?}");
    assert!(ended.stderr.contains("peak_bytes is 0"), "{ended:?}");
    assert!(!ended.stderr.contains("SIGTERM"), "{ended:?}");
}

/// The binary sets up everything; otherwise it would print warnings to standard error.
#[test]
fn the_command_lacks_nothing() {
    let workspace = Workspace::new();
    workspace.succeed(&["train", "run.toml", "--out", "run"]);
    let peak = workspace.metrics("run")[0]["peak_bytes"].as_u64();
    assert!(peak.is_some_and(|bytes| bytes > 0), "{peak:?}");
}

/// A process with some variables of a job with several ranks, but without a rank, runs alone.
#[test]
fn ranks_that_nobody_counts_are_said_once() {
    let workspace = Workspace::new();
    let run = |variables: &[(&str, &str)]| {
        let mut command = workspace.command(&["train", "run.toml", "--out", variables[0].0]);
        workspace.end(command.envs(variables.iter().copied()).spawn().expect("it starts"))
    };
    for variables in [[("WORLD_SIZE", "2")], [("SLURM_NTASKS", "2")]] {
        let ended = run(&variables);
        assert_eq!(ended.code, Some(0), "{ended:?}");
        let says = format!("{}=2 is set, but ", variables[0].0);
        assert_eq!(ended.stderr.matches(&says).count(), 1, "{ended:?}");
    }
    let ended = run(&[("LOCAL_WORLD_SIZE", "2"), ("WORLD_SIZE", "1")]);
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{ended:?}");
}

#[test]
fn a_time_to_save_that_is_none_is_refused() {
    let workspace = Workspace::new();
    for grace in ["abc", "-1", "", "inf"] {
        let mut command = workspace.command(&["train", "run.toml", "--out", "run"]);
        let ended = workspace.end(command.env("KILN_GRACE_S", grace).spawn().expect("it starts"));
        assert_eq!(ended.code, Some(2), "{grace}: {ended:?}");
        let says = format!("error: KILN_GRACE_S={grace}: not a number of seconds, such as 30");
        assert!(ended.stderr.starts_with(&says), "{ended:?}");
        assert!(!workspace.path("run").exists());
    }
}
