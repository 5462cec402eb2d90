//! The scripts in `configs/`: they are there, they parse, and they start what their names say.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

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
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs").join(name)
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

/// Runs a script with a program that prints its arguments in place of kiln.
fn run(name: &str, arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let job = Job::new("echo \"$*\"");
    let mut command = Command::new(script(name));
    command.args(arguments).env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
    command.env("KILN", job.path("rank.sh")).envs(variables.iter().copied());
    command.output().expect("the script starts")
}

fn printed(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

#[test]
fn one_node() {
    for ranks in ["2", "4", "8"] {
        let name = format!("runs/1-node-{ranks}-ranks.sh");
        let place =
            format!("launch --nnodes 1 --nproc-per-node {ranks} --max-restarts 0 --standalone");
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
