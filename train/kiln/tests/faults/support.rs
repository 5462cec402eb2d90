//! A small run whose ranks are processes, and the files of the run.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;

use crate::signals;
use kiln_testkit::{output_of, run_to_end, wait_for, wait_until};
use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
use tempfile::TempDir;

/// Optimizer steps of every run in these tests.
pub const STEPS: u64 = 8;

/// Steps between checkpoints.
const CHECKPOINT_EVERY: u64 = 2;

const CONFIG: &str = r#"
[model]
d_model = 32
layers = 2
heads = 4
d_ff = 64

[data]
text = ["builtin:arithmetic"]
vocab_size = 300
seq_len = 32

[train]
steps = STEPS
global_batch = 12
micro_batch = 1

[optim]
lr = 3e-3
warmup_steps = 2

[eval]
samples = 4

[checkpoint]
every = EVERY

[log]
every = 1

[device]
threads = 1
"#;

/// Data and configuration, created once for all tests.
fn shared() -> &'static Path {
    static SHARED: OnceLock<TempDir> = OnceLock::new();
    let folder = SHARED.get_or_init(|| {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let config = CONFIG.replace("STEPS", &STEPS.to_string());
        let config = config.replace("EVERY", &CHECKPOINT_EVERY.to_string());
        let data = format!("[data]\npath = {:?}", folder.path().join("data"));
        fs::write(folder.path().join("tiny.toml"), config.replace("[data]", &data)).unwrap();
        folder
    });
    folder.path()
}

/// Returns the path of the configuration of all runs in these tests.
pub fn config() -> PathBuf {
    static PREPARED: OnceLock<()> = OnceLock::new();
    let path = shared().join("tiny.toml");
    // A run of one rank prepares the data, so that later runs need not wait for it.
    PREPARED.get_or_init(|| {
        let run = Run::new();
        let ended = run.train_alone(1, &["--set", "train.steps=2"]);
        assert_eq!(ended.code, Some(0), "{ended:?}");
    });
    path
}

/// Exit code and output of a command.
#[derive(Debug)]
pub struct Ended {
    pub code: Option<i32>,
    /// The output, for the messages of failed checks.
    #[allow(dead_code)]
    pub stdout: String,
    pub stderr: String,
}

impl From<Output> for Ended {
    fn from(output: Output) -> Ended {
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        let (stdout, stderr) = (text(output.stdout), text(output.stderr));
        Ended { code: output.status.code(), stdout, stderr }
    }
}

/// Returns a command for `kiln` without the variables that describe a rank's place.
pub fn kiln(arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kiln"));
    signals::with_defaults(&mut command)
        .args(arguments)
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// A separate run folder.
pub struct Run {
    folder: TempDir,
}

impl Run {
    pub fn new() -> Run {
        Run { folder: tempfile::tempdir().expect("a temporary folder") }
    }

    pub fn out(&self) -> PathBuf {
        self.folder().join("run")
    }

    /// Returns the parent folder of the run folder.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Returns the arguments `train CONFIG --out …` followed by `more`.
    pub fn train_arguments(&self, more: &[&str]) -> Vec<String> {
        let path = shared().join("tiny.toml");
        let mut arguments = vec!["train".into(), path.display().to_string()];
        arguments.extend(["--out".into(), self.out().display().to_string()]);
        arguments.extend(more.iter().map(|argument| (*argument).to_owned()));
        arguments
    }

    /// Trains with ranks that are threads of one process.
    pub fn train_alone(&self, ranks: usize, more: &[&str]) -> Ended {
        let ranks = ranks.to_string();
        let arguments = self.train_arguments(&[&["--ranks", &ranks], more].concat());
        run_to_end(&mut kiln(arguments)).into()
    }

    /// Returns a command that runs ranks as processes.
    pub fn launcher(&self, ranks: usize, launch: &[&str], train: &[&str]) -> Command {
        let ranks = ranks.to_string();
        let fixed = ["launch", "--nproc-per-node", &ranks];
        let mut arguments: Vec<String> =
            fixed.iter().chain(launch).map(|argument| (*argument).to_owned()).collect();
        if !launch.contains(&"--grace-s") {
            arguments.extend(["--grace-s".into(), "2".into()]);
        }
        arguments.push("--".into());
        arguments.extend(self.train_arguments(train));
        kiln(arguments)
    }

    pub fn launch(&self, ranks: usize, launch: &[&str], train: &[&str]) -> Ended {
        config();
        run_to_end(&mut self.launcher(ranks, launch, train)).into()
    }

    /// Returns the last printed loss of each step.
    pub fn losses(&self) -> BTreeMap<u64, String> {
        let text = fs::read_to_string(self.out().join("metrics.jsonl")).unwrap_or_default();
        let line = |line: &str| {
            let value: serde_json::Value = serde_json::from_str(line).ok()?;
            Some((value.get("step")?.as_u64()?, value.get("loss")?.to_string()))
        };
        text.lines().filter_map(line).collect()
    }

    /// Writes a program for a fault drill to run.
    pub fn script(&self, text: &str) -> String {
        let path = self.folder.path().join("drill.sh");
        fs::write(&path, format!("#!/bin/sh\n{text}\n")).expect("a script");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("it can be run");
        path.display().to_string()
    }

    /// Writes a program that sends signals to the rank that runs it, each after the previous one was
    /// delivered.
    pub fn signalling(&self, names: &str) -> String {
        self.script(&format!(
            "for name in {names}; do\n\
             kill -$name $PPID\n\
             until grep -q '^ShdPnd:[[:space:]]*0*$' /proc/$PPID/status; do sleep 0.01; done\n\
             done"
        ))
    }

    /// Waits until `steps` steps are logged.
    pub fn wait_for_steps(&self, steps: usize) {
        wait_for(&format!("{steps} steps"), || match self.losses().len() {
            logged if logged >= steps => Ok(()),
            logged => Err(format!("{logged} steps are logged")),
        });
    }

    /// Returns the complete output of ranks in one life, by rank.
    pub fn logs(&self, ranks: usize, life: u64) -> Vec<String> {
        let log = |rank: usize| {
            let stream = |name: &str| {
                let file = format!("logs/rank_{rank}.restart_{life}.{name}.log");
                fs::read_to_string(self.out().join(file)).unwrap_or_default()
            };
            stream("stdout") + &stream("stderr")
        };
        (0..ranks).map(log).collect()
    }

    /// Opens and uses every checkpoint. Returns their steps.
    pub fn check_checkpoints(&self) -> Vec<u64> {
        let folder = self.out().join("checkpoints");
        let entries = fs::read_dir(&folder).map(|entries| entries.flatten().collect());
        let mut steps: Vec<u64> = Vec::new();
        for entry in entries.unwrap_or_else(|_| Vec::new()) {
            let name = entry.file_name().to_string_lossy().into_owned();
            let Some(step) = name.strip_prefix("fsdp_cpt").and_then(|step| step.parse().ok()) else {
                continue;
            };
            let path = entry.path().display().to_string();
            let prompt = ["--prompt", "1 + 1 =", "--max-tokens", "1"];
            let generate = [&["generate", "--checkpoint", &path], &prompt[..]].concat();
            let ended = Ended::from(run_to_end(&mut kiln(generate)));
            assert_eq!(ended.code, Some(0), "{path}: {ended:?}");
            steps.push(step);
        }
        steps.sort_unstable();
        steps
    }

    /// Processes that still work on this run.
    pub fn orphans(&self) -> Vec<String> {
        let out = self.out().display().to_string();
        let entries = fs::read_dir("/proc").expect("/proc").flatten();
        entries
            .filter(|entry| entry.file_name().to_string_lossy().parse::<u32>().is_ok())
            .filter_map(|entry| fs::read(entry.path().join("cmdline")).ok())
            .map(|line| String::from_utf8_lossy(&line).replace('\0', " "))
            .filter(|line| line.contains(&out))
            .collect()
    }
}

/// Returns the losses of an undisturbed run whose ranks are processes.
pub fn undisturbed(ranks: usize) -> BTreeMap<u64, String> {
    static KNOWN: std::sync::Mutex<BTreeMap<usize, BTreeMap<u64, String>>> =
        std::sync::Mutex::new(BTreeMap::new());
    let mut known = KNOWN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let losses = known.entry(ranks).or_insert_with(|| {
        let run = Run::new();
        let ended = run.launch(ranks, &[], &[]);
        assert_eq!(ended.code, Some(0), "{ended:?}");
        run.losses()
    });
    assert_eq!(losses.keys().copied().collect::<Vec<_>>(), (1..=STEPS).collect::<Vec<_>>());
    losses.clone()
}

/// Waits for the end of a child, and returns its output.
pub fn end(process: Child) -> Ended {
    output_of(process).into()
}

/// Sends a signal, such as `TERM`, to a child.
pub fn signal(name: &str, process: &Child) {
    let status = Command::new("kill").args(["-s", name, &process.id().to_string()]).status();
    assert!(status.expect("kill").success());
}

/// Stops a child. On return, none of its threads runs.
pub fn freeze(process: &Child) {
    signal("STOP", process);
    let id = Pid::from_raw(process.id().cast_signed()).expect("a process id");
    let options = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG;
    wait_until("its stop", || waitid(WaitId::Pid(id), options).expect("it is a child").is_some());
}
