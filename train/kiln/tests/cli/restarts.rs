//! Restarted jobs: which runs they take over, and when.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};

use kiln_testkit::{status_of, wait_until};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, waitid};

use crate::run_folder::{FOREVER, assert_refused, in_run, stop, wait_for_a_step};
use crate::support::{Ended, Workspace, signal};

/// One rank of a job, as a launcher would start it.
struct Rank<'a> {
    rank: usize,
    world_size: usize,
    port: u16,
    restarts: u64,
    job: &'a str,
}

impl Rank<'_> {
    fn alone(job: &str, restarts: u64) -> Rank<'_> {
        Rank { rank: 0, world_size: 1, port: free_port(), restarts, job }
    }

    fn place<'c>(&self, command: &'c mut Command) -> &'c mut Command {
        let Rank { rank, world_size, port, restarts, job } = self;
        command
            .env("RANK", rank.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("WORLD_SIZE", world_size.to_string())
            .env("LOCAL_WORLD_SIZE", world_size.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .env("KILN_JOB_SECRET", "of these tests")
            .env("TORCHELASTIC_RUN_ID", job)
            .env("TORCHELASTIC_RESTART_COUNT", restarts.to_string())
    }

    fn start(&self, workspace: &Workspace, arguments: &[&str]) -> Child {
        self.place(&mut workspace.command(arguments)).spawn().expect("it starts")
    }

    fn run(&self, workspace: &Workspace, arguments: &[&str]) -> Ended {
        workspace.end(self.start(workspace, arguments))
    }

    /// Runs the rank under a separate launcher, which is a shell.
    fn run_under_another(&self, workspace: &Workspace, arguments: &[&str]) -> Ended {
        let kiln = workspace.command(arguments);
        let mut shell = Command::new("sh");
        shell.args(["-c", "\"$0\" \"$@\"; exit $?"]).arg(kiln.get_program()).args(arguments);
        shell.current_dir(workspace.path("")).stdout(Stdio::piped());
        let shell = self.place(shell.stderr(Stdio::piped()));
        workspace.end(shell.spawn().expect("a shell"))
    }
}

/// Stops a process. On return, none of its threads runs.
fn freeze(process: &Child) {
    signal(process, Signal::STOP);
    let id = Pid::from_raw(process.id().cast_signed()).expect("a process id");
    let options = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG;
    wait_until("its stop", || waitid(WaitId::Pid(id), options).expect("it is a child").is_some());
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("its address").port()
}

/// A scheduler has given up a job and restarts it, but the job's machine was only slow.
#[test]
fn a_job_that_is_started_again_waits_for_its_former_life() {
    let workspace = Workspace::new();
    let short = ["--set", "comm.join_timeout_s=2", "--set", "checkpoint.every=1"];
    let arguments = in_run(&FOREVER, &short);
    let former = Rank::alone("j", 0).start(&workspace, &arguments);
    wait_for_a_step(&workspace, "run");
    freeze(&former);
    let lines = workspace.metrics("run").len();
    let pid = format!("pid {}", former.id());
    let ended = Rank::alone("j", 1).run(&workspace, &arguments);
    assert_refused(&ended, &["run is in use by a run on host ", &pid]);
    let said = "waiting up to 2 s for run to be free: it is in use by a run on host ";
    assert!(ended.stdout.contains(said), "{ended:?}");
    assert_eq!(workspace.metrics("run").len(), lines);
    // The process continues, and saves on request.
    signal(&former, Signal::CONT);
    stop(&workspace, former);
    let next = Rank::alone("j", 2).start(&workspace, &arguments);
    stop(&workspace, next);
}

/// The first process is gone, but another rank of the job may still write to the folder.
#[test]
fn a_folder_is_held_by_every_rank() {
    let workspace = Workspace::new();
    let arguments = in_run(&FOREVER, &["--set", "checkpoint.every=1"]);
    let port = free_port();
    let rank = |rank| Rank { rank, world_size: 2, port, restarts: 0, job: "j" };
    let (mut first, second) = (rank(0).start(&workspace, &arguments), rank(1).start(&workspace, &arguments));
    wait_until("a checkpoint", || workspace.path("run/checkpoints/latest").exists());
    freeze(&second);
    first.kill().expect("a signal");
    status_of(&mut first);
    let resume = ["train", "run.toml", "--out", "run", "--resume", "latest"];
    let says = ["ranks of an earlier start that still run", &format!("pid {}", first.id())];
    assert_refused(&workspace.kiln(&resume), &says);
    signal(&second, Signal::KILL);
    workspace.end(second);
    let run = workspace.start(&in_run(&FOREVER, &["--resume", "latest"]));
    stop(&workspace, run);
}

/// torchrun names every unnamed job "none".
#[test]
fn a_restart_takes_over_no_run_of_a_stranger() {
    let workspace = Workspace::new();
    let run = in_run(&["train", "run.toml"], &["--set", "checkpoint.every=2"]);
    let ended = Rank::alone("none", 0).run(&workspace, &run);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let before = workspace.tree();
    let refused = ["already holds a run, and this restart does not take it over", "--resume latest"];
    let other_job = "it was started by another job";
    let more = in_run(&["train", "run.toml"], &["--set", "train.steps=6"]);
    let none = Rank::alone("none", 1);
    assert_refused(&none.run_under_another(&workspace, &run), &[refused[0], refused[1], other_job]);
    assert_refused(&none.run(&workspace, &more), &[refused[0], "a different configuration"]);
    assert_refused(&Rank::alone("named", 1).run(&workspace, &run), &[refused[0], other_job]);
    assert!(workspace.tree() == before, "something was written");
    // The launcher that started the run may restart it.
    let ended = none.run(&workspace, &run);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stdout.contains("resuming from run/checkpoints/fsdp_cpt4"), "{ended:?}");
    // The name of a job identifies it no matter who restarts it, but only with the same configuration.
    let named = |restarts| Rank::alone("named", restarts);
    let arguments = ["train", "run.toml", "--out", "named"];
    assert_eq!(named(0).run(&workspace, &arguments).code, Some(0));
    let ended = named(1).run_under_another(&workspace, &arguments);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let other = [&arguments[..], &["--set", "train.steps=6"]].concat();
    assert_refused(&named(2).run(&workspace, &other), &["a different configuration"]);
}

/// A single process whose ranks are threads is the only task of a Slurm step, or runs in the batch script itself.
/// A requeued job may get a different step number.
#[test]
fn a_job_of_a_single_process_is_known_by_its_scheduler() {
    let drill = ["--set", "checkpoint.every=2", "--fault", "error@data:4:0"];
    let arguments = in_run(&["train", "run.toml"], &drill);
    let task = |step| vec![("SLURM_STEP_ID", step), ("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1")];
    let batch = || vec![("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2"), ("SLURM_NNODES", "2")];
    for (first, second) in [(task("1"), task("0")), (batch(), batch())] {
        let workspace = Workspace::new();
        let life = |job: &str, restarts: &str, variables: &[(&str, &str)]| {
            let mut command = workspace.command(&arguments);
            command.env("SLURM_JOB_ID", job).env("SLURM_RESTART_COUNT", restarts);
            workspace.end(command.envs(variables.iter().copied()).spawn().expect("it starts"))
        };
        let ended = life("7", "0", &first);
        assert!(ended.stderr.contains("fault drill"), "{ended:?}");
        assert_eq!(workspace.json("run/run.json")["job"], "7");
        assert_refused(&life("8", "1", &second), &["it was started by another job"]);
        let ended = life("7", "1", &second);
        assert_eq!(ended.code, Some(0), "{ended:?}");
        assert!(ended.stdout.contains("resuming from run/checkpoints/fsdp_cpt2"), "{ended:?}");
    }
}
