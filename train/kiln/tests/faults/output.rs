//! Logs that cannot be written: failed output neither ends a run nor changes how it ends.

use std::fs::{self, File, OpenOptions};
use std::io::{PipeReader, PipeWriter, Read, Write, pipe};
use std::os::unix::fs::symlink;
use std::process::{Child, Command, ExitStatus, Stdio};

use kiln_testkit::{output_of, run_to_end, status_of};
use nix::fcntl::{FcntlArg, fcntl};

use crate::support::{Ended, Run, STEPS, config, kiln};

/// Returns a stand-in for a file on a full disk.
fn full() -> File {
    OpenOptions::new().write(true).open("/dev/full").expect("/dev/full")
}

fn end(command: &mut Command) -> Ended {
    output_of(command.spawn().expect("kiln starts")).into()
}

/// Returns a run with a warning, because one of its checkpoints cannot be written.
fn with_a_warning() -> (Run, Vec<String>) {
    config();
    let run = Run::new();
    let checkpoints = run.out().join("checkpoints");
    let arguments = run.train_arguments(&["--set", "checkpoint.on_failure=continue"]);
    let ended = run.train_alone(1, &["--set", "train.steps=2"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    fs::write(checkpoints.join(".fsdp_cpt4.partial"), "in the way").expect("a file");
    (run, [&arguments[..], &["--resume".to_owned(), "latest".to_owned()]].concat())
}

#[test]
fn a_warning_that_cannot_be_written_is_counted() {
    let (run, arguments) = with_a_warning();
    let ended = end(kiln(arguments).stderr(full()));
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(run.losses().len(), 8);
    // The stream that still works reports how much output the other one has lost.
    let last = ended.stdout.lines().last().unwrap_or_default();
    assert!(last.starts_with("kiln: ") && last.contains("line"), "{ended:?}");
    assert!(last.contains("could not be written to standard error: No space left"), "{ended:?}");
}

#[test]
fn output_that_cannot_be_written_changes_nothing() {
    config();
    let run = Run::new();
    let ended = end(kiln(run.train_arguments(&[])).stdout(full()));
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stderr.contains("could not be written to standard output"), "{ended:?}");
    assert_eq!(run.losses().len(), 8);
    // A reader that closes its end does not count as a loss.
    let run = Run::new();
    let mut process = kiln(run.train_arguments(&[])).spawn().expect("kiln starts");
    drop(process.stdout.take());
    let ended = Ended::from(output_of(process));
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
}

#[test]
fn an_error_that_cannot_be_written_keeps_its_exit_code() {
    config();
    let run = Run::new();
    let wrong = run.train_arguments(&["--set", "optim.lr=-1"]);
    let failing = run.train_arguments(&["--fault", "error@data:2:0"]);
    for (arguments, code) in [(&wrong, 2), (&failing, 1)] {
        let ended = end(kiln(arguments).stderr(full()).stdout(full()));
        assert_eq!(ended.code, Some(code), "{arguments:?}");
    }
    let ended = end(kiln(["train"]).stderr(full()));
    assert_eq!(ended.code, Some(2), "a mistake in the arguments");
}

/// Ranks whose logs are all on a full disk.
fn launched(run: &Run, lives: u64, launch: &[&str], train: &[&str]) -> Ended {
    config();
    let logs = run.out().join("logs");
    fs::create_dir_all(&logs).expect("a folder");
    for rank in 0..2 {
        for life in 0..lives {
            for stream in ["stdout", "stderr"] {
                let log = logs.join(format!("rank_{rank}.restart_{life}.{stream}.log"));
                symlink("/dev/full", log).expect("a link");
            }
        }
    }
    end(run.launcher(2, launch, train).stdin(Stdio::null()))
}

#[test]
fn a_configuration_error_that_no_log_takes_is_not_tried_again() {
    let run = Run::new();
    let ended = launched(&run, 3, &["--max-restarts", "2"], &["--set", "optim.lr=-1"]);
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(!ended.stderr.contains("starting all ranks"), "{ended:?}");
    assert!(ended.stderr.contains("its message: "), "{ended:?}");
    assert!(ended.stderr.contains("optim.lr"), "{ended:?}");
}

#[test]
fn the_rank_that_failed_is_named_though_no_log_took_a_line() {
    let run = Run::new();
    let ended = launched(&run, 1, &[], &["--fault", "error@data:3:1"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let said: Vec<_> = ended.stderr.lines().filter(|l| l.starts_with("kiln launch: ")).collect();
    let first = said.iter().find(|line| line.contains("failed first")).expect("a cause");
    assert!(first.starts_with("kiln launch: rank 1 (pid "), "{said:#?}");
    let error = "kiln launch:   its message: fault drill in data loading of step 3";
    assert!(said.contains(&error), "{said:#?}");
    let lost: Vec<_> = said.iter().filter(|line| line.contains("could not")).collect();
    assert!(lost[0].contains("rank 0: its logs could not take "), "{said:#?}");
    assert!(lost[1].contains("rank 1: 1 line could not"), "{said:#?}");
    assert_eq!(lost.len(), 2, "{said:#?}");
    assert_eq!(run.orphans(), Vec::<String>::new());
}

/// Metrics are for users and their tools; a run continues if they cannot be written.
#[test]
fn metrics_that_cannot_be_written_are_counted() {
    config();
    let run = Run::new();
    let ended = run.train_alone(1, &["--set", "train.steps=2"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    // The file must be larger than any other file of the run, because the limit on file sizes is about its size.
    let path = run.out().join("metrics.jsonl");
    let padding = "x".repeat(1_000_000);
    let content = format!("{{\"step\": 1, \"loss\": 1.0, \"padding\": \"{padding}\"}}\n");
    fs::write(&path, &content).expect("a file");
    let mut shell = Command::new("sh");
    // Room for ten more bytes, which is less than a line.
    let limit = content.len() + 10;
    let text = format!("trap '' XFSZ; exec prlimit --fsize={limit} \"$0\" \"$@\"");
    shell.arg("-c").arg(text).arg(env!("CARGO_BIN_EXE_kiln"));
    shell.args(run.train_arguments(&["--resume", "latest"]));
    let ended = Ended::from(run_to_end(&mut shell));
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stdout.contains("done: 8 steps"), "{ended:?}");
    assert!(ended.stderr.contains("metrics.jsonl: File too large"), "{ended:?}");
    // The lost lines: six steps and an evaluation.
    assert!(ended.stderr.contains("7 lines could not be written to"), "{ended:?}");
    assert_eq!(fs::read_to_string(&path).expect("a file"), content, "no part of a line");
}

/// Capacity of the pipes in these tests, in bytes.
const PIPE: usize = 4096;

/// Returns a pipe with space for `room` bytes, which nobody reads while the returned reader lives.
fn unread(room: usize) -> (PipeReader, PipeWriter) {
    let (reader, mut writer) = pipe().expect("a pipe");
    let size = fcntl(&writer, FcntlArg::F_SETPIPE_SZ(PIPE as i32)).expect("a small pipe");
    assert_eq!(size, PIPE as i32);
    writer.write_all(&vec![b'x'; PIPE - room]).expect("room");
    (reader, writer)
}

/// Waits for the end of a process without reading its output.
fn end_unread(mut process: Child) -> ExitStatus {
    status_of(&mut process)
}

/// Reads all that was written to the pipe.
fn read(mut reader: PipeReader) -> String {
    let mut text = String::new();
    reader.read_to_string(&mut text).expect("text");
    text
}

const WAYS: [Way; 2] = [Way::Threads, Way::Processes];

/// The form in which the two ranks run.
#[derive(Clone, Copy, Debug)]
enum Way {
    Threads,
    Processes,
}

impl Way {
    fn command(self, run: &Run, train: &[&str]) -> Command {
        config();
        match self {
            Way::Threads => kiln(run.train_arguments(&[&["--ranks", "2"], train].concat())),
            Way::Processes => run.launcher(2, &["--grace-s", "60"], train),
        }
    }
}

#[test]
fn a_reader_that_stops_does_not_hold_up_a_run() {
    // The pipe is full from the start, or gets full in the middle of the run's lines.
    for room in [0, 300] {
        for way in WAYS {
            let run = Run::new();
            let mut command = way.command(&run, &[]);
            let (_stopped, stdout) = unread(room);
            let (stderr, end) = pipe().expect("a pipe");
            let process = command.stdout(stdout).stderr(end).spawn().expect("kiln starts");
            drop(command);
            assert_eq!(end_unread(process).code(), Some(0), "room {room}, {way:?}");
            assert_eq!(run.losses().len() as u64, STEPS);
            assert_eq!(run.check_checkpoints().last(), Some(&STEPS));
            let said = read(stderr);
            assert!(said.contains("could not be written to standard output: its reader"), "{said}");
        }
    }
}

#[test]
fn a_run_whose_output_nobody_reads_is_asked_to_stop() {
    for way in WAYS {
        let run = Run::new();
        let mut command = way.command(&run, &["--set", "train.steps=100000"]);
        let ((_stdout, stdout), (_stderr, stderr)) = (unread(0), unread(0));
        let process = command.stdout(stdout).stderr(stderr).spawn().expect("kiln starts");
        drop(command);
        run.wait_for_steps(3);
        let pid = process.id().to_string();
        assert!(Command::new("kill").args(["-s", "TERM", &pid]).status().expect("kill").success());
        assert_eq!(end_unread(process).code(), Some(75), "{way:?}");
        let done = run.losses().keys().last().copied();
        assert_eq!(run.check_checkpoints().last().copied(), done, "{way:?}");
        assert_eq!(run.orphans(), Vec::<String>::new());
    }
}

#[test]
fn a_rank_that_fails_does_not_wait_for_a_reader() {
    config();
    for (fault, code) in [("panic@backward:3:1", Some(1)), ("segv@data:3:0", None)] {
        let run = Run::new();
        let mut command = Way::Threads.command(&run, &["--fault", fault]);
        let ((_stdout, stdout), (_stderr, stderr)) = (unread(0), unread(0));
        let process = command.stdout(stdout).stderr(stderr).spawn().expect("kiln starts");
        drop(command);
        assert_eq!(end_unread(process).code(), code, "{fault}");
    }
}

/// A slow reader gets all lines in order.
#[test]
fn a_reader_that_is_late_gets_every_line_of_a_run() {
    config();
    let run = Run::new();
    let (reader, stdout) = unread(0);
    let mut command = kiln(run.train_arguments(&[]));
    let process = command.stdout(stdout).spawn().expect("kiln starts");
    drop(command);
    run.wait_for_steps(2);
    let text = read(reader);
    assert_eq!(end_unread(process).code(), Some(0));
    let steps: Vec<_> = text.lines().filter(|line| line.starts_with("step ")).collect();
    let steps = steps.iter().filter(|line| line.contains("| loss ")).count();
    assert_eq!(steps as u64, STEPS, "{text}");
    assert!(text.contains("done: 8 steps"), "{text}");
}
