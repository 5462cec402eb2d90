//! A folder with a script that plays the ranks, in which the launcher runs.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use crate::signals;
use kiln_testkit::{output_of, run_to_end, wait_until};
use tempfile::TempDir;

/// The start of every script. `wait_for` waits for a file, `wait_end` for the end of the process whose id is in a
/// file; scripts wait for these events instead of for some time.
const PRELUDE: &str = r#"#!/bin/sh
wait_for() { while [ ! -e "$1" ]; do sleep 0.01; done; }
wait_end() { wait_for "$1"; while kill -0 "$(cat "$1")" 2>/dev/null; do sleep 0.01; done; }
put() { echo "$2" > "$1.new"; mv "$1.new" "$1"; }
"#;

pub struct Job {
    folder: TempDir,
}

/// Exit code and output of a command.
#[derive(Debug)]
pub struct Ended {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Job {
    /// Returns a folder whose ranks run `script`.
    pub fn new(script: &str) -> Job {
        let job = Job { folder: tempfile::tempdir().expect("a temporary folder") };
        let path = job.path("rank.sh");
        fs::write(&path, format!("{PRELUDE}{script}\n")).expect("a script");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("permissions");
        job
    }

    pub fn path(&self, relative: &str) -> PathBuf {
        self.folder.path().join(relative)
    }

    pub fn text(&self, relative: &str) -> String {
        let path = self.path(relative);
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }

    /// Returns a command for `kiln` with these arguments and only these variables.
    pub fn kiln(&self, arguments: &[&str], variables: &[(&str, &str)]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kiln"));
        signals::with_defaults(&mut command)
            .args(arguments)
            .current_dir(self.folder.path())
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// Returns a command for `kiln launch` whose ranks run the script.
    pub fn launcher(&self, arguments: &[&str], variables: &[(&str, &str)]) -> Command {
        let all = [
            &["launch", "--program", "./rank.sh"],
            arguments,
            &["--", "train", "config.toml", "--out", "run"],
        ];
        self.kiln(&all.concat(), variables)
    }

    /// Launches, and waits for the end of the launcher.
    pub fn launch(&self, arguments: &[&str], variables: &[(&str, &str)]) -> Ended {
        ended(run_to_end(&mut self.launcher(arguments, variables)))
    }

    /// Waits until the ranks have created these files.
    pub fn wait_for(&self, files: &[&str]) {
        for file in files {
            wait_until(file, || self.path(file).exists());
        }
    }

    /// Returns the names of the logs, sorted.
    pub fn logs(&self, folder: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(folder)).expect("a log folder");
        let name = |entry: std::io::Result<fs::DirEntry>| entry.expect("an entry").file_name();
        let mut names: Vec<_> = entries.map(|entry| name(entry).into_string().expect("UTF-8")).collect();
        names.sort();
        names
    }
}

pub fn ended(output: Output) -> Ended {
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    Ended { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

/// Sends a signal, by name.
pub fn send(signal: &str, process: &Child) {
    let status = Command::new("kill").args(["-s", signal, &process.id().to_string()]).status();
    assert!(status.expect("kill").success());
}

pub fn finish(process: Child) -> Ended {
    ended(output_of(process))
}

/// Returns the parent of a process, if the process exists and is not a zombie.
pub fn parent_of(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat")).ok()?;
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_whitespace();
    let state = fields.next()?;
    let parent = fields.next()?.parse().ok()?;
    (state != "Z" && state != "X").then_some(parent)
}

/// Returns the living children of a process.
pub fn children_of(pid: u32) -> Vec<u32> {
    let entries = fs::read_dir("/proc").expect("/proc");
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter(|child| parent_of(*child) == Some(pid)).collect()
}
