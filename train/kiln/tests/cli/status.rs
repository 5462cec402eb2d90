//! `kiln status` of runs that train, hang, are stopped, lag, have ended or were killed.

use std::fs;
use std::process::Child;

use kiln_testkit::{status_of, wait_for};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value as Json;

use crate::support::{Ended, Workspace, signal};

/// An endless run of four processes in the folder `run`, killed on drop.
struct Job<'a> {
    workspace: &'a Workspace,
    launcher: Child,
}

impl<'a> Job<'a> {
    fn start(workspace: &'a Workspace, fault: &[&str]) -> Self {
        let run = ["launch", "--nproc-per-node", "4", "--", "train", "run.toml", "--out", "run"];
        let endless = ["--set", "train.steps=100000000", "--set", "comm.timeout_s=1000"];
        let fault: Vec<_> = fault.iter().flat_map(|fault| ["--fault", fault]).collect();
        let mut command = workspace.command(&[&run[..], &endless[..], &fault[..]].concat());
        command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
        Job { workspace, launcher: command.spawn().expect("the launcher starts") }
    }

    /// Polls the status until it satisfies `wanted`. Returns the status and its exit code.
    fn wait_until(&self, what: &str, wanted: impl Fn(&Json) -> bool) -> (Json, Option<i32>) {
        wait_for(what, || match status(self.workspace, &[]) {
            (Some(look), code) if wanted(&look) => Ok((look, code)),
            (look, code) => Err(format!("{:#}, exit code {code:?}", look.unwrap_or_default())),
        })
    }
}

impl Drop for Job<'_> {
    fn drop(&mut self) {
        // The ranks end with their launcher, including stopped ones.
        let _ = self.launcher.kill();
        status_of(&mut self.launcher);
    }
}

/// Returns the output of `kiln status --json` for the run in `run`; `None` if there is no run yet.
fn status(workspace: &Workspace, more: &[&str]) -> (Option<Json>, Option<i32>) {
    let Ended { code, stdout, .. } = workspace.kiln(&[&["status", "run", "--json"], more].concat());
    (serde_json::from_str(&stdout).ok(), code)
}

fn workspace() -> Workspace {
    let workspace = Workspace::new();
    workspace.config("run.toml", &[("train.global_batch", "4"), ("train.micro_batch", "1")]);
    workspace
}

fn state(look: &Json) -> &str {
    look["state"].as_str().expect("a state")
}

fn text(look: &Json) -> &str {
    look["text"].as_str().expect("a text")
}

fn step(look: &Json) -> u64 {
    look["step"].as_u64().unwrap_or(0)
}

fn pid_of(look: &Json, rank: usize) -> Pid {
    let processes = look["processes"].as_array().expect("processes");
    let process = processes.iter().find(|process| process["ranks"][0] == rank).expect("one of each rank");
    Pid::from_raw(process["process"].as_i64().expect("an id") as i32).expect("an id")
}

#[test]
fn a_run_that_goes_on_is_healthy_and_one_that_is_stopped_is_not() {
    let workspace = workspace();
    let job = Job::start(&workspace, &[]);
    let is_well = |look: &Json| step(look) >= 3 && state(look) == "healthy";
    let (look, code) = job.wait_until("a healthy run", is_well);
    assert_eq!(code, Some(0), "{look:#}");
    assert_eq!((&look["steps"], &look["deadline_s"]), (&100000000.into(), &1000.0.into()));
    assert!(look["loss"].as_f64().unwrap() > 0.0 && look["tokens_per_s"].as_f64().unwrap() > 0.0);
    let ranks = look["ranks"].as_array().unwrap();
    assert_eq!(ranks.len(), 4);
    for (index, rank) in ranks.iter().enumerate() {
        assert_eq!(rank["rank"], index);
        assert!(rank["step"].as_u64().unwrap() > 0 && rank["peak_bytes"].as_u64().unwrap() > 0, "{rank:#}");
        assert!(rank["activity"]["name"].is_string() && rank["last"]["module"].is_string(), "{rank:#}");
    }
    // The same status as text.
    let health = "\nhealthy: no rank has been waiting longer than usual";
    let said = wait_for("a healthy run in words", || {
        let said = workspace.succeed(&["status", "run"]);
        if said.contains(health) { Ok(said) } else { Err(said) }
    });
    let lines: Vec<_> = said.lines().collect();
    assert!(said.starts_with("run run: 4 ranks in 4 processes on 1 machine, step "), "{said}");
    assert!(lines.iter().all(|line| line.chars().count() <= 80), "{said}");
    assert!(lines.iter().any(|line| line.starts_with("rank  step    doing ")), "{said}");

    for rank in [2, 0] {
        let process = pid_of(&look, rank);
        kill_process(process, Signal::STOP).unwrap();
        let (stopped, code) = job.wait_until("a stopped rank", |look| state(look) == "trouble");
        assert_eq!(code, Some(1), "{stopped:#}");
        assert_eq!(stopped["culprits"], Json::from([rank].to_vec()));
        let begin = format!("rank {rank} is stopped, as by Ctrl-Z, SIGSTOP or a debugger");
        assert!(text(&stopped).starts_with(&begin), "{stopped:#}");
        assert_eq!(stopped["ranks"][rank]["silent"], "is stopped");
        let (stacks, _) = status(&workspace, &["--stacks"]);
        let stacks = stacks.unwrap();
        let threads = stacks["processes"][rank]["threads"].as_array().unwrap().clone();
        assert!(threads.iter().all(|thread| thread["calls"][0] == "state T"), "{threads:?}");
        // The other ranks continue until they need the stopped rank, and report that they wait for it. They need
        // not all wait in the same collective: some may already have its data.
        let ends = "; comm.timeout_s ends the run in ";
        let (waiting, _) = job.wait_until("ranks that wait", |look| text(look).contains(ends));
        assert!(
            [" wait in #", " waits in #"].iter().any(|wait| text(&waiting).contains(wait)),
            "{waiting:#}"
        );
        kill_process(process, Signal::CONT).unwrap();
        let before = step(&stopped);
        let is_well = |look: &Json| step(look) > before + 3 && ["healthy", "slow"].contains(&state(look));
        job.wait_until("a run that goes on", is_well);
    }
}

#[test]
fn a_rank_that_hangs_is_suspected_before_the_deadline() {
    let workspace = workspace();
    let job = Job::start(&workspace, &["slow=100000@backward:3:2"]);
    // All other ranks now need the stopped rank.
    let all_wait = "; ranks 0, 1, 3 wait; the longest wait is ";
    let is_suspect = |look: &Json| state(look) == "trouble" || text(look).contains(all_wait);
    let (look, code) = job.wait_until("a suspicion", is_suspect);
    assert_eq!((state(&look), code), ("suspicion", Some(1)), "{look:#}");
    assert_eq!(look["culprits"], Json::from(vec![2]));
    assert!(text(&look).starts_with("rank 2 has not entered #"), "{look:#}");
    assert!(text(&look).contains("; it has been in backward for "), "{look:#}");
    for rank in [0, 1, 3] {
        assert_eq!(look["ranks"][rank]["waits_for"], Json::from(vec![2]));
    }
    assert_eq!(look["ranks"][2]["waits_for"], Json::from(Vec::<u64>::new()));

    // The stacks of its threads.
    let (stacks, _) = status(&workspace, &["--stacks"]);
    let threads = stacks.unwrap()["processes"][2]["threads"].as_array().unwrap().clone();
    let sleeps = |thread: &Json| {
        let calls = thread["calls"].as_array().unwrap();
        thread["name"] == "rank2-compute0"
            && calls.iter().any(|call| call.as_str().unwrap().contains("sleep"))
    };
    assert!(threads.iter().any(sleeps), "{threads:#?}");

    // As on a machine that has only rank 0, which asks the other ranks for their status.
    for rank in [1, 2, 3] {
        fs::remove_file(workspace.path(format!("run/debug/rank_{rank}.json"))).unwrap();
    }
    let (look, code) = status(&workspace, &[]);
    let look = look.unwrap();
    assert_eq!((state(&look), code), ("suspicion", Some(1)), "{look:#}");
    assert_eq!((&look["culprits"], look["ranks"].as_array().unwrap().len()), (&Json::from(vec![2]), 4));
    assert_eq!(look["ranks"][3]["waits_for"], Json::from(vec![2]));

    // Without rank 0, the status of the other ranks is unknown.
    fs::rename(workspace.path("run/debug/rank_0.json"), workspace.path("run/debug/aside")).unwrap();
    let (look, _) = status(&workspace, &[]);
    assert_eq!(state(&look.unwrap()), "starting");
    fs::rename(workspace.path("run/debug/aside"), workspace.path("run/debug/rank_0.json")).unwrap();

    // After all processes are killed, the folder is not held and the run has not reported an end.
    drop(job);
    let (dead, code) = wait_for("the death of the run", || match status(&workspace, &[]) {
        (Some(look), code) if state(&look) == "dead" => Ok((look, code)),
        (look, _) => Err(format!("{:#}", look.unwrap_or_default())),
    });
    assert_eq!(code, Some(1));
    assert!(text(&dead).contains("was killed") && text(&dead).contains("nothing was saved"), "{dead:#}");
    assert_eq!(step(&dead), 2);
}

/// Polls the status of the run in `run` until it satisfies `wanted`.
fn look_for(workspace: &Workspace, wanted: impl Fn(&Json) -> bool) -> (Json, Option<i32>) {
    wait_for("the wanted status", || match status(workspace, &[]) {
        (Some(look), code) if wanted(&look) => Ok((look, code)),
        other => Err(format!("{other:?}")),
    })
}

#[test]
fn ranks_that_have_not_come_are_named() {
    let workspace = workspace();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let start = |rank: &str| {
        let place =
            ["--rank", rank, "--world-size", "4", "--master-addr", "127.0.0.1", "--master-port", &port];
        let mut command =
            workspace.command(&[&["train", "run.toml", "--out", "run"][..], &place[..]].concat());
        command.env("KILN_JOB_SECRET", "of all ranks").spawn().expect("it starts")
    };
    let first = start("0");
    let (look, code) = look_for(&workspace, |look| text(look).contains("rank 0 has reached"));
    assert_eq!((state(&look), code), ("starting", Some(0)), "{look:#}");
    assert!(text(&look).contains("; ranks 1-3 are missing; the wait has lasted "), "{look:#}");
    let second = start("2");
    let (look, _) = look_for(&workspace, |look| text(look).contains("ranks 0, 2 have reached"));
    assert!(
        text(&look).contains(&format!("reached the rendezvous at 127.0.0.1:{port}; ranks 1, 3 are missing"))
    );
    assert_eq!(look["culprits"], Json::from(vec![1, 3]));
    assert_eq!(look["ranks"][2]["silent"], "has arrived, from 127.0.0.1", "{look:#}");
    assert_eq!(look["ranks"][3]["silent"], "has not arrived", "{look:#}");
    let said = workspace.succeed(&["status", "run"]);
    assert!(
        said.contains("\nstarting or ending: ranks are waiting for each other: ranks 0, 2 have reached"),
        "{said}"
    );
    // A killed rank is no longer listed, and stopping leaves no files.
    kill_process(Pid::from_raw(second.id() as i32).unwrap(), Signal::KILL).unwrap();
    workspace.end(second);
    look_for(&workspace, |look| {
        text(look).contains("rank 0 has reached") && text(look).contains("ranks 1-3")
    });
    signal(&first, Signal::TERM);
    assert_eq!(workspace.end(first).code, Some(75));
    let ended = workspace.kiln(&["status", "run"]);
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(!workspace.path("run/.kiln/waiting_0.json").exists());
}

#[test]
fn a_run_that_died_of_a_nan_says_so() {
    let workspace = Workspace::new();
    let nan = ["train", "run.toml", "--out", "run", "--fault", "nan@backward:3:1"];
    let launch = ["launch", "--nproc-per-node", "2", "--"];
    for start in [nan.to_vec(), [&launch[..], &nan].concat()] {
        assert_eq!(workspace.kiln(&start).code, Some(1));
        let (look, code) = status(&workspace, &[]);
        let look = look.unwrap();
        assert_eq!((state(&look), code), ("failed", Some(1)), "{look:#}");
        let begin = "the run failed after step 2: ";
        let says = ["step 3: the gradient norm is NaN", "; nothing was saved"];
        let is_said = text(&look).starts_with(begin) && says.iter().all(|says| text(&look).contains(says));
        assert!(is_said, "{look:#}");
        workspace.remove("run");
    }
}

#[test]
fn ranks_of_other_machines_are_asked_by_rank_0() {
    // Two separate folders, as on two machines.
    let machines = [workspace(), workspace()];
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let jobs: Vec<_> = ["0", "1"]
        .iter()
        .zip(&machines)
        .map(|(node, workspace)| {
            let port = port.to_string();
            let place = ["--nnodes", "2", "--node-rank", node, "--master-addr", "127.0.0.1"];
            let ranks = ["--master-port", &port, "--nproc-per-node", "2", "--", "train", "run.toml"];
            let train =
                ["--out", "run", "--set", "comm.timeout_s=1000", "--fault", "slow=100000@backward:3:3"];
            let mut command = workspace.command(&[&["launch"], &place[..], &ranks[..], &train[..]].concat());
            command.env("KILN_JOB_SECRET", "of both machines");
            command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
            Job { workspace, launcher: command.spawn().expect("the launcher starts") }
        })
        .collect();
    let is_bad = |look: &Json| ["suspicion", "trouble"].contains(&state(look));
    let (look, code) = jobs[0].wait_until("a suspicion", is_bad);
    assert_eq!((state(&look), code), ("suspicion", Some(1)), "{look:#}");
    assert_eq!(look["culprits"], Json::from(vec![3]));
    assert!(text(&look).starts_with("rank 3 has not entered #"), "{look:#}");
    let doing = |rank: usize| look["ranks"][rank]["activity"]["name"].as_str();
    assert_eq!([0, 1, 2, 3].map(doing), [Some("backward"); 4], "{look:#}");
    assert_eq!(look["processes"].as_array().unwrap().len(), 2, "{look:#}");
    // On the other machine, only its own ranks are known.
    let (look, _) = jobs[1].wait_until("a suspicion", is_bad);
    assert_eq!(state(&look), "suspicion", "{look:#}");
    assert!(
        text(&look).starts_with("ranks are waiting, possibly for ranks 0-1, whose state is unknown"),
        "{look:#}"
    );
    assert!(look["ranks"][0]["silent"].is_string() && look["ranks"][2]["silent"].is_null(), "{look:#}");
    // Stops a rank on the other machine.
    kill_process(pid_of(&look, 2), Signal::STOP).unwrap();
    let (look, code) = jobs[0].wait_until("a stopped rank", |look| state(look) == "trouble");
    assert_eq!(code, Some(1), "{look:#}");
    assert_eq!(look["culprits"], Json::from(vec![2]));
    assert!(text(&look).starts_with("rank 2 has not answered for "), "{look:#}");
}

#[test]
fn a_rank_that_lags_is_named() {
    let workspace = workspace();
    let job = Job::start(&workspace, &["slow=0.3@backward:2+:1"]);
    let (look, code) = job.wait_until("a rank that lags", |look| state(look) == "slow");
    assert_eq!(code, Some(0), "{look:#}");
    assert_eq!(look["culprits"], Json::from(vec![1]));
    assert!(text(&look).starts_with("rank 1 was late for "), "{look:#}");
}

#[test]
fn a_process_that_died_is_named_while_others_are_there() {
    let workspace = workspace();
    let job = Job::start(&workspace, &["slow=100000@backward:3:2"]);
    let (look, _) = job.wait_until("a suspicion", |look| state(look) == "suspicion");
    // The launcher is stopped, because it would end the other ranks.
    signal(&job.launcher, Signal::STOP);
    kill_process(pid_of(&look, 0), Signal::STOP).unwrap();
    kill_process(pid_of(&look, 3), Signal::KILL).unwrap();
    let (look, code) = job.wait_until("a process that is gone", |look| text(look).contains("gone"));
    assert_eq!((state(&look), code), ("trouble", Some(1)), "{look:#}");
    assert!(text(&look).starts_with("rank 3 died: its process "), "{look:#}");
    assert!(look["ranks"][3]["silent"].as_str().unwrap().contains("is gone"), "{look:#}");
    signal(&job.launcher, Signal::CONT);
}

#[test]
fn threads_are_one_process_and_followed_to_their_end() {
    let workspace = Workspace::new();
    let slow = ["train", "run.toml", "--out", "run", "--set", "comm.timeout_s=1000", "--fault"];
    let mut run = workspace.start(&[&slow[..], &["slow=3@backward:3:1"]].concat());
    workspace.wait_for_steps("run", 2);
    let ended = workspace.kiln(&["status", "run", "--follow", "--json"]);
    assert!(status_of(&mut run).success());
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{ended:?}");
    let looks: Vec<Json> = ended.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let first = &looks[0];
    assert_eq!(first["processes"].as_array().unwrap().len(), 1, "{first:#}");
    assert_eq!(first["processes"][0]["ranks"], Json::from(vec![0, 1]));
    let last = looks.last().unwrap();
    assert_eq!((state(last), step(last)), ("finished", 4), "{last:#}");
    assert!(!workspace.path("run/debug").exists());
    // Again as text, long after the run's end.
    let said = workspace.succeed(&["status", "run", "--follow"]);
    assert!(said.starts_with("run run: step 4 of 4, loss "), "{said}");
    assert!(said.ends_with("\nfinished: all steps are done\n"), "{said}");
}

#[test]
fn runs_that_have_ended_say_how() {
    let workspace = Workspace::new();
    // A failed run, with the verdict of the ranks.
    let failed = workspace.kiln(&["train", "run.toml", "--out", "run", "--fault", "panic@backward:3:1"]);
    assert_eq!(failed.code, Some(1));
    let (look, code) = status(&workspace, &[]);
    let look = look.unwrap();
    assert_eq!((state(&look), step(&look), code), ("failed", 2, Some(1)), "{look:#}");
    assert!(text(&look).starts_with("verdict: ") && text(&look).ends_with("; nothing was saved"), "{look:#}");
    workspace.remove("run");

    // A requested stop.
    let slow = ["train", "run.toml", "--out", "run", "--fault", "slow=3@data:3:0"];
    let child = workspace.start(&slow);
    workspace.wait_for_steps("run", 2);
    signal(&child, Signal::TERM);
    assert_eq!(workspace.end(child).code, Some(75));
    let (look, code) = status(&workspace, &[]);
    let look = look.unwrap();
    assert_eq!((state(&look), code), ("stopped", Some(0)), "{look:#}");
    assert!(text(&look).contains("is saved; resume with: kiln train --resume run"), "{look:#}");
    workspace.remove("run");

    // Folders that hold no run.
    workspace.write("notes/mine.txt", "mine");
    fs::create_dir(workspace.path("empty")).unwrap();
    for (folder, why) in [
        ("nowhere", "nowhere is not a run folder: it is not there"),
        ("empty", "nothing is in it"),
        ("notes", "it has mine.txt"),
        ("run.toml", "it is a file"),
    ] {
        let ended = workspace.kiln(&["status", folder, "--follow"]);
        assert_eq!((ended.code, ended.stdout.as_str()), (Some(2), ""), "{ended:?}");
        assert!(ended.stderr.contains(why), "{ended:?}");
    }
}
