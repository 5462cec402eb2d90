//! The scripts in `configs/`: they exist, they parse, and they start the commands that their names promise.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use kiln_testkit::status_of;
use rustix::process::{Pid, Signal, kill_process};

use crate::support::Job;

const SCRIPTS: [&str; 8] = [
    "runs/1-node-2-ranks.sh",
    "runs/1-node-4-ranks.sh",
    "runs/1-node-8-ranks.sh",
    "runs/2-nodes-4-ranks.sh",
    "runs/2-nodes-8-ranks.sh",
    "runs/launch.sh",
    "slurm/launch.sbatch",
    "slurm/train.sbatch",
];

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs").join(name)
}

#[test]
fn scripts_may_be_executed_and_parse() {
    for name in SCRIPTS {
        let path = script(name);
        let metadata = path.metadata().unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(metadata.permissions().mode() & 0o111, 0o111, "{name}");
        let parsed = Command::new("bash").arg("-n").arg(&path).output().expect("bash");
        assert!(parsed.status.success() && parsed.stderr.is_empty(), "{name}: {parsed:?}");
    }
}

/// Runs a script with a program that prints its arguments instead of kiln.
fn run(name: &str, arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let job = Job::new("echo \"$*\"");
    let mut command = Command::new(script(name));
    command.args(arguments).env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
    command.env("KILN", job.path("rank.sh")).envs(variables.iter().copied());
    kiln_testkit::run_to_end(&mut command)
}

fn printed(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// A Slurm job whose step runs the script `srun`, until it gets a signal or ends.
struct SlurmJob {
    folder: Job,
    recipe: &'static str,
}

impl SlurmJob {
    /// Creates a job: `srun` is the script of its step, and `state` is its state after the step.
    fn new(recipe: &'static str, srun: &str, state: &str) -> SlurmJob {
        let folder = Job::new("");
        fs::create_dir(folder.path("bin")).expect("a folder");
        let ready = format!("touch '{}'", folder.path("ready").display());
        let requeued = format!("echo \"$*\" >>'{}'", folder.path("requeued").display());
        let wait = "while kill -0 $PPID; do sleep 0.01; done";
        for (name, text) in [
            ("srun", format!("{srun}\n{ready}\n{wait}")),
            ("squeue", format!("echo {state}")),
            ("scontrol", requeued),
        ] {
            let path = folder.path("bin").join(name);
            fs::write(&path, format!("#!/bin/sh\n{text}\n")).expect("a script");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("permissions");
        }
        SlurmJob { folder, recipe }
    }

    /// Runs the recipe. With `stop`, sends its script SIGTERM once the step has started. Returns the exit
    /// code and the arguments of `scontrol`.
    fn run(&self, stop: bool) -> (Option<i32>, String) {
        let paths = std::env::var("PATH").unwrap_or_default();
        let mut script = Command::new(script(self.recipe))
            .args(["my.toml", "--out", "run"])
            .env("PATH", format!("{}:{paths}", self.folder.path("bin").display()))
            .envs([("SLURM_JOB_ID", "7"), ("SLURM_NNODES", "2")])
            .spawn()
            .expect("the script starts");
        if stop {
            self.folder.wait_for(&["ready"]);
            let id = Pid::from_raw(script.id().cast_signed()).expect("a process id");
            kill_process(id, Signal::TERM).expect("a signal");
        }
        let code = status_of(&mut script).code();
        (code, fs::read_to_string(self.folder.path("requeued")).unwrap_or_default())
    }
}

#[test]
fn a_slurm_job_goes_back_into_the_queue_if_it_was_stopped() {
    // srun kills its tasks at SIGTERM.
    let saves = "trap 'exit 75' USR1\ntrap 'exit 137' TERM";
    let is_killed = "trap 'exit 137' USR1";
    for recipe in ["slurm/train.sbatch", "slurm/launch.sbatch"] {
        let requeued = "requeue 7\n".to_owned();
        let run = |srun: &str, state: &str, stop| SlurmJob::new(recipe, srun, state).run(stop);
        assert_eq!(run(saves, "RUNNING", true), (Some(75), requeued.clone()), "{recipe}");
        assert_eq!(run("exit 75", "RUNNING", false), (Some(75), requeued.clone()), "{recipe}");
        assert_eq!(run(is_killed, "RUNNING", true), (Some(137), requeued), "{recipe}");
        // The job is cancelled, or Slurm requeues it.
        assert_eq!(run(saves, "COMPLETING", true), (Some(75), String::new()), "{recipe}");
        for code in [0, 1, 137] {
            let ended = run(&format!("exit {code}"), "RUNNING", false);
            assert_eq!(ended, (Some(code), String::new()), "{recipe}");
        }
    }
}

#[test]
fn one_node() {
    for ranks in ["2", "4", "8"] {
        let name = format!("runs/1-node-{ranks}-ranks.sh");
        let place = format!("launch --nnodes 1 --nproc-per-node {ranks} --max-restarts 0 --standalone");
        let output = run(&name, &["my.toml", "--out", "a b"], &[]);
        assert_eq!(printed(&output), format!("{place} -- train my.toml --out a b"));
        let output = run(&name, &[], &[]);
        assert!(printed(&output).ends_with("debug.toml"), "{output:?}");
    }
}

#[test]
fn two_nodes() {
    let all = [("NODE_RANK", "1"), ("MASTER_ADDR", "host0"), ("KILN_JOB_SECRET", "s")];
    for ranks in ["4", "8"] {
        let name = format!("runs/2-nodes-{ranks}-ranks.sh");
        let expected = format!(
            "launch --nnodes 2 --nproc-per-node {ranks} --max-restarts 0 --node-rank 1 \
             --master-addr host0 --master-port 29500 -- train my.toml"
        );
        assert_eq!(printed(&run(&name, &["my.toml"], &all)), expected);
        for missing in 0..all.len() {
            let mut some = all.to_vec();
            let (variable, _) = some.remove(missing);
            let output = run(&name, &["my.toml"], &some);
            assert_eq!(output.status.code(), Some(2), "{output:?}");
            let message = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(message.starts_with(&format!("{variable} is not set")), "{message}");
        }
    }
}
