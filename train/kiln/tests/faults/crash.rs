//! Signals: those raised by a fault of the process are reported with rank and step, and those that the parent
//! process ignores stay ignored.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use kiln_testkit::run_to_end;

use crate::support::{Ended, Run, config, kiln};

const SIGSEGV: i32 = 11;

#[test]
fn a_fault_in_a_rank_is_told_with_its_step_and_what_it_did() {
    config();
    let run = Run::new();
    let ended = run.launch(2, &[], &["--fault", "segv@backward:3:1"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let log = &run.logs(2, 0)[1];
    for text in [log, &ended.stderr] {
        let line = text.lines().find(|line| line.contains("kiln: SIGSEGV")).expect("a line");
        assert!(line.contains("kiln: SIGSEGV on rank 1, step 3, in backward after "), "{line}");
        let folder = run.out().join("crash/rank_1");
        assert!(line.ends_with(&format!("); crash report: {}", folder.display())), "{line}");
    }
    let first = ended.stderr.lines().find(|line| line.contains("failed first")).expect("a cause");
    assert!(first.contains("rank 1 (pid ") && first.contains("killed by SIGSEGV (11)"), "{first}");
    assert_eq!(run.orphans(), Vec::<String>::new());
}

/// A launcher may restart the job, but not forever: these faults occur again in every life.
#[test]
fn a_failure_that_comes_back_in_the_same_step_ends_the_job() {
    config();
    for (fault, says) in
        [("nan!@backward:5:0", "step 5: "), ("segv!@backward:5:1", "kiln: SIGSEGV on rank 1, step 5")]
    {
        let run = Run::new();
        let train = ["--fault", fault, "--set", "checkpoint.async=false"];
        let ended = run.launch(2, &["--max-restarts", "9"], &train);
        assert_eq!(ended.code, Some(1), "{ended:?}");
        assert!(ended.stderr.contains(says), "{ended:?}");
        let last = ended.stderr.lines().last().unwrap_or_default();
        assert!(last.contains("failed in step 5 with the same error as before"), "{ended:?}");
        let lives = (0..9).filter(|life| run.logs(2, *life).iter().any(|log| !log.is_empty()));
        assert_eq!(lives.count(), 2, "{ended:?}");
        // The job has resumed from a checkpoint.
        assert_eq!(run.check_checkpoints(), [2, 4]);
    }
}

/// As with Ctrl-Z: a collective's time limit passes while no rank runs.
#[test]
fn ranks_that_were_all_stopped_do_not_blame_the_network_or_each_other() {
    config();
    let run = Run::new();
    let flight = run.out().join("flight/rank_0.json");
    let script = run.script(&format!(
        "launcher=$(sed 's/.*) . //; s/ .*//' /proc/$PPID/stat)\n\
         ranks=$(cat /proc/$launcher/task/*/children)\n\
         kill -STOP $ranks; sleep 8; kill -CONT $ranks\n\
         until [ -e {} ]; do sleep 0.01; done",
        flight.display()
    ));
    let fault = format!("run={script}@backward:3:1");
    let ended = run.launch(2, &[], &["--fault", &fault, "--set", "comm.timeout_s=2"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    for part in ["the processes of ranks 0, 1 did not run for about", "the network is not to blame"] {
        assert!(ended.stderr.contains(part), "{part}: {ended:?}");
    }
    assert_eq!(run.orphans(), Vec::<String>::new());
}

#[test]
fn a_fault_in_a_thread_is_told_with_its_rank() {
    config();
    let run = Run::new();
    let arguments = run.train_arguments(&["--ranks", "2", "--fault", "segv@forward:2:1"]);
    let output = run_to_end(&mut kiln(arguments));
    assert_eq!(output.status.signal(), Some(SIGSEGV));
    let ended = Ended::from(output);
    let told = "kiln: SIGSEGV on rank 1, step 2, in forward after ";
    assert!(ended.stderr.starts_with(told), "{ended:?}");
    assert_eq!(ended.stderr.lines().count(), 1, "{ended:?}");
}

#[test]
fn a_signal_from_outside_names_its_sender_and_keeps_its_status() {
    config();
    for (name, signal) in [("ABRT", 6), ("BUS", 7), ("FPE", 8), ("ILL", 4), ("SEGV", SIGSEGV)] {
        let run = Run::new();
        // The rank runs a program that sends the signal to the rank's process.
        let script = run.script(&format!("kill -{name} $PPID"));
        let fault = format!("run={script}@data:2:0");
        let arguments = run.train_arguments(&["--ranks", "1", "--fault", &fault]);
        let output = run_to_end(&mut kiln(arguments));
        assert_eq!(output.status.signal(), Some(signal), "{name}");
        let ended = Ended::from(output);
        let told = format!("kiln: SIG{name} (sent by process ");
        assert!(ended.stderr.starts_with(&told), "{ended:?}");
        assert!(ended.stderr.contains(") on rank 0, step "), "{ended:?}");
    }
}

#[test]
fn signals_that_are_ignored_from_the_start_ask_for_nothing() {
    config();
    let run = Run::new();
    let script = run.script("kill -USR1 $PPID; kill -TERM $PPID; kill -TERM $PPID");
    let fault = format!("run={script}@data:2:0");
    let arguments = run.train_arguments(&["--fault", &fault]);
    let mut shell = Command::new("sh");
    shell.args(["-c", "trap '' USR1 TERM; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_kiln")]);
    let ended = Ended::from(run_to_end(shell.args(arguments)));
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{ended:?}");
    assert_eq!(run.losses().len() as u64, crate::support::STEPS);
}
