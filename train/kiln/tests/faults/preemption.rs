//! Processes that are asked to stop save the last complete step on all ranks, and resume later.

use std::fmt::Write as _;
use std::fs;
use std::process::{Child, Command};

use kiln_testkit::{Said, wait_for, wait_until};

use crate::support::{Ended, Run, config, end, kiln, signal, undisturbed};

const RANKS: usize = 2;

fn wait_for_step(run: &Run, step: u64) {
    wait_for(&format!("step {step}"), || match run.losses().keys().last() {
        Some(last) if *last >= step => Ok(()),
        last => Err(format!("{last:?} is the last step")),
    });
}

#[test]
fn a_job_that_is_asked_to_stop_saves_and_goes_on_to_the_same_bits() {
    config();
    for name in ["USR1", "USR2", "TERM"] {
        let run = Run::new();
        // Rank 1 is late in step 4, so that the signal arrives while the others wait for it.
        let slow = ["--fault", "slow=2@data:4:1"];
        let launcher = run.launcher(RANKS, &["--grace-s", "30"], &slow).spawn().expect("kiln starts");
        wait_for_step(&run, 3);
        signal(name, &launcher);
        let ended = end(launcher);
        assert_eq!(ended.code, Some(75), "{name}: {ended:?}");
        let saved = run.check_checkpoints();
        let last = run.losses().keys().last().copied();
        assert_eq!(saved.last().copied(), last, "{name}");
        assert!(last < Some(crate::support::STEPS), "{name}: it ran to its end");
        let ended = run.launch(RANKS, &[], &["--resume", "latest"]);
        assert_eq!(ended.code, Some(0), "{name}: {ended:?}");
        assert_eq!(run.losses(), undisturbed(RANKS), "{name}");
        assert_eq!(run.orphans(), Vec::<String>::new());
    }
}

/// Returns a fault drill in which `rank` is asked to stop at the start of `step`.
fn asked_in(run: &Run, name: &str, step: u64, rank: usize) -> String {
    format!("run={}@data:{step}:{rank}", run.signalling(name))
}

/// A terminal sends SIGINT to every process in its foreground, and a launcher also forwards the signal to its
/// ranks: together they count as one request.
#[test]
fn ctrl_c_is_one_request_whoever_passes_it_on() {
    config();
    let run = Run::new();
    let told_twice = run.script("kill -INT $PPID; kill -TERM $PPID");
    let ended = run.train_alone(RANKS, &["--fault", &format!("run={told_twice}@data:4:0")]);
    assert_eq!(ended.code, Some(75), "{ended:?}");
    assert!(ended.stdout.contains("interrupted: saving step 4; Ctrl-C again"), "{ended:?}");
    assert_eq!(run.check_checkpoints().last(), Some(&4));

    let run = Run::new();
    let all = run.script(
        "launcher=$KILN_LAUNCHER_PID\n\
         for rank in $(grep -l \"^PPid:[[:space:]]*$launcher\\$\" /proc/[0-9]*/status 2>/dev/null); do\n\
         rank=${rank#/proc/}; kill -INT ${rank%/status}; done\n\
         kill -INT $launcher",
    );
    let drill = format!("run={all}@data:4:1");
    let ended = run.launch(RANKS, &["--grace-s", "60"], &["--fault", &drill]);
    assert_eq!(ended.code, Some(75), "{ended:?}");
    assert!(ended.stderr.contains("SIGINT (2): the ranks have "), "{ended:?}");
    assert_eq!(run.check_checkpoints().last(), Some(&4), "{ended:?}");
    assert_eq!(run.orphans(), Vec::<String>::new());
    let ended = run.launch(RANKS, &[], &["--resume", "latest"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(run.losses(), undisturbed(RANKS));
}

/// Slurm and systemd send SIGTERM to all processes of a job, and the launcher forwards the signal that it gets.
#[test]
fn a_rank_hears_of_a_stop_from_its_launcher_and_from_others() {
    config();
    let run = Run::new();
    let twice = format!("run={}@data:3:0", run.signalling("TERM TERM"));
    let ended = run.launch(RANKS, &[], &["--fault", &twice]);
    assert_eq!(ended.code, Some(75), "{ended:?}");
    assert_eq!(run.check_checkpoints().last(), run.losses().keys().last());
    // The same without a launcher: `timeout` sends SIGTERM to the process and to its group. A closing terminal
    // sends SIGHUP, and so does its shell.
    for pair in ["TERM TERM", "HUP HUP"] {
        let run = Run::new();
        let twice = format!("run={}@data:3:0", run.signalling(pair));
        let ended = run.train_alone(RANKS, &["--fault", &twice]);
        assert_eq!(ended.code, Some(75), "{ended:?}");
        assert!(ended.stdout.contains("stopped on request: 3 of 8 steps"), "{ended:?}");
    }
    // A second request means that the user is in a hurry.
    let run = Run::new();
    // The script ends with the rank, and does not keep the rank's output open.
    let later = run.script(
        "exec > /dev/null 2>&1\n\
         kill -TERM $PPID; sleep 1.2; kill -TERM $PPID\n\
         while kill -0 $PPID; do sleep 0.01; done",
    );
    let drill = format!("run={later}@data:3:0");
    let ended = run.train_alone(RANKS, &["--fault", &drill, "--set", "checkpoint.async=false"]);
    assert_eq!(ended.code, Some(143), "{ended:?}");
    let says = "kiln: ended at once by a second SIGTERM in step 3: nothing was saved since step 2";
    assert_eq!(ended.stderr.trim_end(), says);
}

/// How long the first step of a life takes is unknown, so a stop may abandon this step; later steps are known to
/// be short.
#[test]
fn a_step_that_may_be_long_is_given_up_and_done_again_to_the_same_bits() {
    config();
    let run = Run::new();
    // Of each life: the step in whose first micro-batch a rank is asked to stop, the rank, the steps done.
    for (life, (asked, rank, done)) in [(1, 1, 0), (4, 0, 4), (5, 1, 4)].into_iter().enumerate() {
        let fault = asked_in(&run, ["TERM", "USR1"][life % 2], asked, rank);
        let resume: &[&str] = if life > 0 { &["--resume", "latest"] } else { &[] };
        let ended = run.launch(RANKS, &[], &[&["--fault", &fault], resume].concat());
        assert_eq!(ended.code, Some(75), "{ended:?}");
        let said = format!("stopped on request: {done} of 8 steps, checkpoint ");
        assert!(ended.stdout.contains(&said), "{ended:?}");
        assert_eq!(run.check_checkpoints().last().copied(), Some(done), "{ended:?}");
        assert_eq!(run.losses().len() as u64, done, "{ended:?}");
        assert!(!run.out().join("flight").exists());
    }
    let ended = run.launch(RANKS, &[], &["--resume", "latest"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(run.losses(), undisturbed(RANKS));
    assert_eq!(run.orphans(), Vec::<String>::new());
}

#[test]
fn a_run_that_is_asked_to_stop_while_it_saves_begins_no_other_step() {
    config();
    for way in ["checkpoint.async=false", "checkpoint.format=full"] {
        let run = Run::new();
        let fault = format!("run={}@checkpoint:4:1", run.signalling("TERM"));
        let ended = run.train_alone(RANKS, &["--set", way, "--fault", &fault]);
        assert_eq!(ended.code, Some(75), "{ended:?}");
        assert!(ended.stdout.contains("stopped on request: 4 of 8 steps"), "{ended:?}");
        assert_eq!(run.check_checkpoints(), [2, 4]);
    }
}

#[test]
fn work_that_is_longer_than_the_grace_is_said_once() {
    config();
    let run = Run::new();
    let ended = run.launch(RANKS, &["--grace-s", "0"], &[]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let said = ended.stderr.lines().filter(|line| line.contains("longer than the 0 s"));
    assert_eq!(said.count(), 1, "{ended:?}");
    assert!(ended.stderr.contains("a micro-batch takes"), "{ended:?}");
    assert!(ended.stderr.contains("--grace-s"), "{ended:?}");
}

/// Reads a process's output until a line contains `text`, and the rest until its end.
fn end_after(mut process: Child, text: &str, name: &str) -> Ended {
    let mut said = Said::of(process.stdout.take().expect("its output"));
    said.expect(text);
    signal(name, &process);
    let ended = end(process);
    Ended { stdout: said.all(), ..ended }
}

#[test]
fn preparing_data_is_given_up_when_asked() {
    let run = Run::new();
    fs::create_dir_all(run.out()).expect("a folder");
    let (text, data) = (run.out().join("text.txt"), run.out().join("data"));
    // Enough text that the preparation is still running when the signal arrives.
    let mut content = String::new();
    for line in 0..600_000_u64 {
        writeln!(content, "{} and {}", line * 7919 % 1009, line % 97).expect("text");
    }
    fs::write(&text, content).expect("a file");
    let [text, data] = [text, data].map(|path| path.display().to_string());
    let arguments = ["data", "prepare", "--input", &text, "--out", &data, "--vocab-size", "300"];
    let process = kiln(arguments).spawn().expect("kiln starts");
    let ended = end_after(process, "data: training a tokenizer", "TERM");
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(75), ""), "{ended:?}");
    let last = ended.stdout.lines().last().unwrap_or_default();
    assert!(last.starts_with("stopped on request while data was prepared"), "{ended:?}");
    assert!(!fs::exists(&data).expect("a folder"));

    // All ranks of a job wait for rank 0, which prepares the data.
    let sets = [format!("data.text=[{text:?}]"), format!("data.path={data:?}")];
    config();
    let job = Run::new();
    let train = ["--set", &sets[0], "--set", &sets[1]];
    let process = job.launcher(RANKS, &["--grace-s", "30"], &train).spawn().expect("kiln starts");
    let ended = end_after(process, "data: training a tokenizer", "TERM");
    assert_eq!(ended.code, Some(75), "{ended:?}");
    assert!(ended.stdout.contains("stopped on request while data was prepared"), "{ended:?}");
    assert!(!fs::exists(&data).expect("a folder"));
    assert_eq!(job.orphans(), Vec::<String>::new());
}

/// Returns `true` if a process handles SIGTERM.
fn handles_sigterm(process: u32) -> bool {
    const BIT: u64 = 1 << (15 - 1);
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    caught.is_some_and(|mask| u64::from_str_radix(mask.trim(), 16).is_ok_and(|m| m & BIT != 0))
}

#[test]
fn waiting_for_ranks_that_do_not_come_is_given_up_when_asked() {
    config();
    let run = Run::new();
    // A listener at the master's port that never replies.
    let master = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = master.local_addr().expect("an address").port().to_string();
    let place = ["--rank", "1", "--world-size", "2", "--master-addr", "127.0.0.1"];
    let patience = ["--set", "comm.join_timeout_s=10", "--master-port", &port];
    let process = kiln(run.train_arguments(&[&place[..], &patience].concat()))
        .env("KILN_JOB_SECRET", "s")
        .spawn()
        .expect("kiln starts");
    wait_until("a process that listens to SIGTERM", || handles_sigterm(process.id()));
    signal("TERM", &process);
    let ended = end(process);
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(75), ""), "{ended:?}");
    assert!(ended.stdout.contains("stopped on request before the ranks were connected"), "{ended:?}");
    assert!(!run.out().exists());
}

/// Returns the process of a rank that a launcher has started, once the process handles SIGTERM.
fn rank_of(launcher: &Child, rank: usize) -> Option<u32> {
    let (parent, rank) = (format!("PPid:\t{}", launcher.id()), format!("RANK={rank}"));
    let processes = fs::read_dir("/proc").expect("/proc").flatten();
    let processes = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let is_rank = |process: &u32| {
        let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
        let variables = fs::read(format!("/proc/{process}/environ")).unwrap_or_default();
        status.lines().any(|line| line == parent)
            && variables.split(|byte| *byte == 0).any(|variable| variable == rank.as_bytes())
    };
    processes.filter(is_rank).find(|process| handles_sigterm(*process))
}

/// Rank 0 prepares data from a FIFO without a writer, and one rank of the job is asked to stop.
#[test]
fn a_rank_that_is_asked_to_stop_while_rank_0_prepares_data_stops_the_job() {
    config();
    for asked in 0..RANKS {
        let run = Run::new();
        let text = run.folder().join("text.txt");
        assert!(Command::new("mkfifo").arg(&text).status().expect("mkfifo").success());
        let data = run.folder().join("data");
        let sets = [format!("data.text=[{text:?}]"), format!("data.path={data:?}")];
        let train = ["--set", &sets[0], "--set", &sets[1]];
        let launcher = run.launcher(RANKS, &["--grace-s", "60"], &train).spawn().expect("kiln starts");
        wait_for("data that rank 0 reads", || {
            let log = run.logs(RANKS, 0).swap_remove(0);
            if log.contains("data: reading") { Ok(()) } else { Err(log) }
        });
        let listens = || rank_of(&launcher, asked).ok_or_else(|| "no such process".to_owned());
        let rank = wait_for("a rank that listens to SIGTERM", listens);
        let told = Command::new("kill").args(["-s", "TERM", &rank.to_string()]).status();
        assert!(told.expect("kill").success());
        let ended = end(launcher);
        assert_eq!(ended.code, Some(75), "rank {asked}: {ended:?}");
        for log in run.logs(RANKS, 0) {
            assert!(log.contains("stopped on request while data was prepared"), "{asked}: {log}");
        }
        assert!(!data.exists());
        assert_eq!(run.orphans(), Vec::<String>::new());
    }
}

/// Ranks 2 and 3 are on a node that never arrives.
#[test]
fn a_rank_that_is_asked_to_stop_before_all_have_met_stops_the_job() {
    config();
    for asked in 0..RANKS {
        let run = Run::new();
        let port = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = port.local_addr().expect("an address").port().to_string();
        let nodes = ["--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1"];
        let restarts = ["--master-port", &port, "--max-restarts", "1"];
        let patience = ["--set", "comm.join_timeout_s=120"];
        let launch = [&nodes[..], &restarts].concat();
        let launcher = run.launcher(RANKS, &launch, &patience).spawn().expect("kiln starts");
        let ranks = wait_for("ranks that listen to SIGTERM", || {
            let ranks: Vec<u32> = (0..RANKS).filter_map(|rank| rank_of(&launcher, rank)).collect();
            if ranks.len() == RANKS { Ok(ranks) } else { Err(format!("processes {ranks:?}")) }
        });
        let told = Command::new("kill").args(["-s", "TERM", &ranks[asked].to_string()]).status();
        assert!(told.expect("kill").success());
        let ended = end(launcher);
        assert_eq!(ended.code, Some(75), "rank {asked}: {ended:?}");
        assert!(ended.stderr.contains("a rank was asked to stop before"), "{asked}: {ended:?}");
        assert!(!ended.stderr.contains("again, restart"), "rank {asked}: {ended:?}");
        for log in run.logs(RANKS, 0) {
            assert!(log.contains("stopped on request before the ranks were connected"), "{asked}: {log}");
        }
        assert_eq!(run.orphans(), Vec::<String>::new());
    }
}
