//! `kiln train` with `comm.backend = "mpi"` under a real `mpirun`:
//!
//!     cargo test --release --workspace --features kiln/mpi --test mpi
//!
//! Needs Open MPI and libclang (Debian: libopenmpi-dev, openmpi-bin, libclang-dev).

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tempfile::TempDir;

/// A folder with prepared data.
struct Folder(TempDir);

/// Exit code and output of a command.
#[derive(Debug)]
struct Ended {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Ended {
    fn of(command: &mut Command) -> Ended {
        let output = command.stdin(Stdio::null()).output();
        let output = output.unwrap_or_else(|error| panic!("{command:?} does not start: {error}"));
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Ended { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
    }
}

impl Folder {
    /// Returns a folder with a run `threads-<ranks>` for each number of ranks, which are threads.
    fn with_threads(ranks: &[usize]) -> Folder {
        let folder = Folder(tempfile::tempdir().expect("a temporary folder"));
        for ranks in ranks {
            let mut kiln = Command::new(env!("CARGO_BIN_EXE_kiln"));
            let threads = ["--ranks", &ranks.to_string()];
            let run = kiln.args(folder.arguments(&format!("threads-{ranks}"))).args(threads);
            let ended = Ended::of(run);
            assert_eq!(ended.code, Some(0), "{ended:?}");
        }
        folder
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn arguments(&self, out: &str) -> Vec<String> {
        let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/debug.toml");
        let [config, out] = [config, self.path(out)].map(|path| path.display().to_string());
        let mut arguments = ["train", &config, "--out", &out].map(str::to_owned).to_vec();
        let data = format!("data.path={}", self.path("data").display());
        for set in [&data, "train.steps=6", "optim.warmup_steps=0", "log.every=1"] {
            arguments.extend(["--set".to_owned(), set.to_owned()]);
        }
        arguments
    }

    /// Trains into `out` with `ranks` processes under mpirun.
    fn mpirun(&self, ranks: usize, out: &str, more: &[&str]) -> Ended {
        self.mpirun_with(&[], ranks, out, more)
    }

    /// [`Folder::mpirun`] with settings of Open MPI.
    fn mpirun_with(&self, settings: &[(&str, &str)], ranks: usize, out: &str, more: &[&str]) -> Ended {
        let mut mpirun = Command::new("mpirun");
        mpirun
            // By default, Open MPI refuses to run as root; tests may.
            .envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")])
            .envs(settings.iter().map(|(name, value)| (format!("OMPI_MCA_{name}"), value)))
            .args(["--oversubscribe", "-n", &ranks.to_string(), env!("CARGO_BIN_EXE_kiln")])
            .args(self.arguments(out))
            .args(["--set", "comm.backend=mpi"])
            .args(more);
        Ended::of(&mut mpirun)
    }

    /// Returns the step and loss of every line, as printed.
    fn losses(&self, out: &str) -> Vec<(u64, String)> {
        let text = fs::read_to_string(self.path(out).join("metrics.jsonl")).expect("metrics");
        let line = |line: &str| {
            let value: serde_json::Value = serde_json::from_str(line).expect("JSON");
            Some((value["step"].as_u64()?, value.get("loss")?.to_string()))
        };
        text.lines().filter_map(line).collect()
    }

    fn assert_losses_of_threads(&self, ranks: usize, out: &str) {
        let expected = self.losses(&format!("threads-{ranks}"));
        assert_eq!(expected.len(), 6);
        assert_eq!(self.losses(out), expected, "{ranks} ranks");
    }
}

#[test]
fn losses_are_those_of_threads() {
    let folder = Folder::with_threads(&[2, 4]);
    for ranks in [2, 4] {
        let out = format!("mpi-{ranks}");
        let ended = folder.mpirun(ranks, &out, &[]);
        assert_eq!(ended.code, Some(0), "{ended:?}");
        assert!(ended.stdout.contains(&format!("ranks: {ranks} x ")), "{ended:?}");
        folder.assert_losses_of_threads(ranks, &out);
    }
}

/// The failed rank reports its own error without waiting for others; the other ranks name the failed rank.
#[test]
fn an_error_on_one_rank_ends_all() {
    let folder = Folder::with_threads(&[]);
    for (ranks, failing) in [(2, 0), (2, 1), (4, 2)] {
        let fault = format!("error@data:3:{failing}");
        let ended = folder.mpirun(ranks, &format!("{ranks}-{failing}"), &["--fault", &fault]);
        assert_eq!(ended.code, Some(1), "{ended:?}");
        let own = "error: fault drill in data loading of step 3";
        assert!(ended.stderr.contains(own), "{ended:?}");
        // By default, mpirun kills the other ranks after a second; with this setting, all ranks end by themselves.
        let patient = [("orte_abort_on_non_zero_status", "0")];
        let out = format!("{ranks}-{failing}-patient");
        let ended = folder.mpirun_with(&patient, ranks, &out, &["--fault", &fault]);
        let others = format!("(world rank {failing}): fault drill in data loading of step 3");
        assert_eq!(ended.stderr.matches(own).count(), 1, "{ended:?}");
        assert_eq!(ended.stderr.matches(&others).count(), ranks - 1, "{ended:?}");
    }
    // An error in the configuration of one rank is a usage error of all ranks.
    let other = [":", "-n", "1", env!("CARGO_BIN_EXE_kiln")].map(str::to_owned);
    let more = [&other[..], &folder.arguments("other")].concat();
    let mut more: Vec<&str> = more.iter().map(String::as_str).collect();
    more.extend(["--set", "comm.backend=mpi", "--set", "train.steps=7"]);
    let ended = folder.mpirun(1, "other", &more);
    assert_eq!(ended.code, Some(2), "{ended:?}");
    let said = "ranks [1] do not have the same configuration";
    assert!(ended.stderr.contains(said), "{ended:?}");
}

#[test]
fn a_rank_that_dies_or_hangs_ends_all() {
    let folder = Folder::with_threads(&[]);
    let ended = folder.mpirun(2, "dies", &["--fault", "kill@backward:3:1"]);
    assert_eq!(ended.code, Some(137), "{ended:?}");
    let hang = ["--fault", "stop@backward:3:1", "--set", "comm.timeout_s=2"];
    let ended = folder.mpirun(2, "hangs", &hang);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    // The message is rank 0's error or, if MPI does not give back the buffers, its last message.
    assert!(ended.stderr.contains("rank 1 has not answered for"), "{ended:?}");
}

/// mpirun passes on the exit code of a run, and passes SIGUSR1 on to every rank.
#[test]
fn a_run_that_is_asked_to_stop_goes_on_to_the_same_bits() {
    let folder = Folder::with_threads(&[2]);
    let script = folder.path("ask.sh");
    let text = "#!/bin/sh\nkill -USR1 $PPID\n\
                until grep -q '^ShdPnd:[[:space:]]*0*$' /proc/$PPID/status; do sleep 0.01; done\n";
    fs::write(&script, text).expect("a script");
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).expect("it can be run");
    let fault = format!("run={}@data:3:1", script.display());
    let ended = folder.mpirun(2, "run", &["--fault", &fault]);
    assert_eq!(ended.code, Some(75), "{ended:?}");
    assert!(ended.stdout.contains("stopped on request: 3 of 6 steps"), "{ended:?}");
    let ended = folder.mpirun(2, "run", &["--resume", "latest"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    folder.assert_losses_of_threads(2, "run");
}
