//! A folder with tiny data and a tiny model, in which the binary runs.
//!
//! The folder is the binary's working directory, so that paths in messages are relative and the same on every
//! machine.

use kiln::config::Config;
use kiln::data::Tokenizer;
use kiln::source::ModelSource;
use kiln_testkit::{output_of, wait_for};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value as Json;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use tempfile::TempDir;
use toml::{Table, Value};

use crate::signals;

/// Vocabulary of the data's tokenizer: one id per byte, and the end of text.
pub const VOCAB: usize = 257;

/// Tokens per sequence of [`RUN`].
pub const SEQ_LEN: usize = 8;

/// Tokens of `data/train.bin`: enough for 20 steps of 8 different samples.
pub const TRAIN_TOKENS: usize = 1801;

/// A run of a few milliseconds. It sets `device.peak_tflops`, so that no peak is measured.
pub const RUN: &str = r#"
[model]
d_model = 16
layers = 2
heads = 4
kv_heads = 2
d_ff = 32

[data]
path = "data"
seq_len = 8

[train]
steps = 4
global_batch = 8
micro_batch = 2
ranks = 2

[optim]
lr = 1e-2
warmup_steps = 2

[eval]
samples = 8

[checkpoint]
keep = 0

[log]
every = 1

[device]
backend = "cpu"
threads = 1
peak_tflops = 1.0
"#;

/// A temporary working directory with `data/` and `run.toml`.
pub struct Workspace {
    folder: TempDir,
}

/// Exit code and output of the binary.
#[derive(Debug)]
pub struct Ended {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Workspace {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let workspace = Workspace { folder };
        workspace.write_data("data", &tokens(TRAIN_TOKENS));
        workspace.write("run.toml", RUN);
        workspace
    }

    pub fn path(&self, relative: impl AsRef<Path>) -> PathBuf {
        self.folder.path().join(relative)
    }

    pub fn write(&self, relative: &str, content: impl AsRef<[u8]>) {
        let path = self.path(relative);
        fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
        fs::write(path, content).expect("a file");
    }

    pub fn read(&self, relative: impl AsRef<Path>) -> Vec<u8> {
        let path = self.path(relative);
        fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }

    pub fn text(&self, relative: impl AsRef<Path>) -> String {
        String::from_utf8(self.read(relative)).expect("UTF-8")
    }

    pub fn json(&self, relative: impl AsRef<Path>) -> Json {
        serde_json::from_slice(&self.read(relative)).expect("JSON")
    }

    /// Returns the state of the run at a checkpoint.
    pub fn state(&self, checkpoint: &str) -> Json {
        self.json(format!("{checkpoint}/manifest.json"))["state"].clone()
    }

    /// Changes the manifest of a checkpoint, and updates its checksum.
    pub fn replace_in_manifest(&self, checkpoint: &str, from: &str, to: &str) {
        let path = format!("{checkpoint}/manifest.json");
        self.replace(&path, from, to);
        let text = self.text(&path);
        let (_, rest) = text.split_once('\n').expect("two lines");
        let checksum = kiln::checkpoint::Checksum::of(rest.as_bytes());
        self.write(&path, format!("{{ \"checksum\": \"{checksum}\",\n{rest}"));
    }

    /// Replaces text in a file.
    pub fn replace(&self, relative: &str, from: &str, to: &str) {
        let text = self.text(relative);
        assert!(text.contains(from), "{relative} has no {from}");
        self.write(relative, text.replace(from, to));
    }

    /// Writes prepared data with `train` as its training split.
    pub fn write_data(&self, folder: &str, train: &[u16]) {
        let bytes = |tokens: &[u16]| tokens.iter().flat_map(|t| t.to_le_bytes()).collect::<Vec<_>>();
        let validation = &tokens(200)[40..];
        let info = serde_json::json!({
            "format_version": 1,
            "dtype": "u16",
            "vocab_size": VOCAB,
            "end_of_text": 0,
            "train": { "tokens": train.len() },
            "validation": { "tokens": validation.len() },
        });
        self.write(&format!("{folder}/train.bin"), bytes(train));
        self.write(&format!("{folder}/val.bin"), bytes(validation));
        self.write(&format!("{folder}/data.json"), info.to_string());
        tokenizer().save(self.path(folder).join("tokenizer.json")).expect("a tokenizer");
    }

    /// Writes a configuration: [`RUN`] with some values changed. Values are TOML.
    pub fn config(&self, file: &str, changes: &[(&str, &str)]) -> Config {
        let table = changed(changes);
        let text = toml::to_string(&table).expect("TOML");
        self.write(file, &text);
        toml::from_str(&text).expect("a configuration")
    }

    /// Runs the binary.
    pub fn kiln(&self, arguments: &[&str]) -> Ended {
        self.end(self.start(arguments))
    }

    /// Starts the binary.
    pub fn start(&self, arguments: &[&str]) -> Child {
        self.command(arguments).spawn().expect("the binary starts")
    }

    /// Runs another program instead of the binary.
    pub fn run(&self, program: &Path, arguments: &[&str]) -> Ended {
        self.end(self.command_of(program, arguments).spawn().expect("the program starts"))
    }

    /// Returns a command that starts the binary.
    pub fn command(&self, arguments: &[&str]) -> Command {
        self.command_of(Path::new(crate::PROGRAM), arguments)
    }

    /// Returns a command that starts another program.
    pub fn command_of(&self, program: &Path, arguments: &[&str]) -> Command {
        let mut command = Command::new(program);
        signals::with_defaults(&mut command);
        command
            .args(arguments)
            .current_dir(self.folder.path())
            .env_remove("KILN_LOG")
            // Tests do not preempt these runs, which would warn about long steps on a busy machine.
            .env("KILN_GRACE_S", "100000")
            // Vulkan drivers complain if this variable is not set.
            .env("XDG_RUNTIME_DIR", self.folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// Waits until the run in `out` has logged `steps` steps.
    pub fn wait_for_steps(&self, out: &str, steps: usize) {
        let logged = || {
            let text = fs::read_to_string(self.path(out).join("metrics.jsonl")).unwrap_or_default();
            text.lines().filter(|line| line.contains("\"loss\"")).count()
        };
        let seen = || match logged() {
            count if count >= steps => Ok(()),
            count => Err(format!("{count} steps are logged")),
        };
        wait_for(&format!("{steps} steps of {out}"), seen);
    }

    /// Waits for the end of a child of [`Workspace::start`].
    pub fn end(&self, child: Child) -> Ended {
        let output = output_of(child);
        // Removes the folder's path, so that the text is the same on every machine, as for relative paths.
        let folder = format!("{}/", self.folder.path().display());
        let text = |bytes| String::from_utf8(bytes).expect("UTF-8").replace(&folder, "");
        Ended { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
    }

    /// Runs the binary, which must succeed. Returns its output.
    pub fn succeed(&self, arguments: &[&str]) -> String {
        let ended = self.kiln(arguments);
        assert_eq!(ended.code, Some(0), "kiln {arguments:?}: {ended:?}");
        // Progress of work that takes long, as it may on a busy machine.
        let mut problems = ended.stderr.lines().filter(|line| !line.contains(" s so far"));
        assert_eq!(problems.next(), None, "kiln {arguments:?}: {ended:?}");
        ended.stdout
    }

    /// Returns the lines of `<out>/metrics.jsonl`.
    pub fn metrics(&self, out: &str) -> Vec<Json> {
        let text = self.text(format!("{out}/metrics.jsonl"));
        text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    }

    /// (step, loss, gradient norm) of every logged step.
    pub fn steps(&self, out: &str) -> Vec<(u64, f64, f64)> {
        let number = |line: &Json, key: &str| line[key].as_f64().expect("a number");
        self.metrics(out)
            .iter()
            .filter(|line| line.get("loss").is_some())
            .map(|line| {
                let step = line["step"].as_u64().expect("a step");
                (step, number(line, "loss"), number(line, "grad_norm"))
            })
            .collect()
    }

    pub fn losses(&self, out: &str) -> Vec<f64> {
        self.steps(out).into_iter().map(|(_, loss, _)| loss).collect()
    }

    /// Returns the last validation loss.
    pub fn val_loss(&self, out: &str) -> f64 {
        let metrics = self.metrics(out);
        let mut losses = metrics.iter().filter_map(|line| line.get("val_loss"));
        losses.next_back().and_then(Json::as_f64).expect("a validation loss")
    }

    /// Returns the sorted names of checkpoints and of other entries of their folder.
    pub fn checkpoints(&self, out: &str) -> Vec<String> {
        names(&self.path(out).join("checkpoints"))
    }

    /// Returns every file below the working directory with its content; folders have none.
    pub fn tree(&self) -> BTreeMap<PathBuf, Option<Vec<u8>>> {
        let mut tree = BTreeMap::new();
        let mut folders = vec![self.folder.path().to_owned()];
        while let Some(folder) = folders.pop() {
            for name in names(&folder) {
                let path = folder.join(name);
                let content = path.is_file().then(|| fs::read(&path).expect("a file"));
                if path.is_dir() {
                    folders.push(path.clone());
                }
                tree.insert(path, content);
            }
        }
        tree
    }

    pub fn copy(&self, from: &str, to: &str) {
        for (path, content) in self.tree() {
            if let Ok(relative) = path.strip_prefix(self.path(from)) {
                let target = self.path(to).join(relative);
                match content {
                    None => fs::create_dir_all(target).expect("a folder"),
                    Some(content) => {
                        fs::create_dir_all(target.parent().expect("a parent")).expect("a folder");
                        fs::write(target, content).expect("a file");
                    }
                }
            }
        }
    }

    pub fn remove(&self, relative: &str) {
        let path = self.path(relative);
        let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
        removed.expect("something to remove");
    }
}

/// Sends a signal to a child.
pub fn signal(child: &Child, signal: Signal) {
    let id = Pid::from_raw(child.id().cast_signed()).expect("a process id");
    kill_process(id, signal).expect("it is there");
}

/// Returns the sorted names of the entries of a folder.
pub fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let name = |entry: std::io::Result<fs::DirEntry>| entry.expect("an entry").file_name();
    let mut names: Vec<_> = entries.map(|entry| name(entry).into_string().expect("UTF-8")).collect();
    names.sort();
    names
}

/// [`RUN`] with some values changed.
pub fn changed(changes: &[(&str, &str)]) -> Table {
    let mut table: Table = toml::from_str(RUN).expect("TOML");
    for (key, value) in changes {
        let (section, key) = key.split_once('.').expect("section.key");
        let value: Table = toml::from_str(&format!("value = {value}")).expect("a TOML value");
        let section = table.entry(section).or_insert_with(|| Value::Table(Table::new()));
        let section = section.as_table_mut().expect("a section");
        section.insert(key.to_owned(), value["value"].clone());
    }
    table
}

/// Returns the bits of every weight.
pub fn weights(workspace: &Workspace, folder: &str) -> BTreeMap<String, Vec<u32>> {
    let source = ModelSource::open(&workspace.path(folder)).expect("a checkpoint");
    let weights = source.weights();
    let read = |(name, shape): (&str, &[usize])| {
        let mut values = vec![0.0; shape.iter().product()];
        weights.read(name, 0..values.len(), &mut values).expect("values");
        (name.to_owned(), values.into_iter().map(f32::to_bits).collect())
    };
    weights.shapes().into_iter().map(read).collect()
}

/// Returns the path of a program in `train/kiln/examples/`. `cargo test` builds it unless only some targets are
/// selected.
pub fn example(name: &str) -> PathBuf {
    let tests = std::env::current_exe().expect("the test's own file");
    let path = tests.parent().and_then(|deps| deps.parent()).expect("the folder of the profile");
    let path = path.join("examples").join(name);
    assert!(path.is_file(), "{} is missing: cargo build --release --workspace --examples", path.display());
    path
}

/// Returns a tokenizer of single bytes.
pub fn tokenizer() -> Tokenizer {
    Tokenizer::train(std::iter::empty(), VOCAB).expect("a tokenizer")
}

/// Returns the token ids of an aperiodic text in which some letters are more likely than others.
pub fn tokens(count: usize) -> Vec<u16> {
    let text: String = (0..count as u64)
        .map(|at| char::from(b'a' + (at * at % 7 + at * at * at % 11 + at / 64 % 5) as u8))
        .collect();
    let ids = tokenizer().encode(&text).expect("ids");
    assert_eq!(ids.len(), count);
    ids.into_iter().map(|id| u16::try_from(id).expect("a small id")).collect()
}

/// Fails unless both runs have the same steps, with losses and norms within `tolerance` of each other. 0
/// requires the same bits.
pub fn assert_same_curve(what: &str, a: &[(u64, f64, f64)], b: &[(u64, f64, f64)], tolerance: f64) {
    assert_eq!(a.len(), b.len(), "{what}: number of steps");
    let close = |a: f64, b: f64| (a - b).abs() <= tolerance * b.abs();
    for (a, b) in a.iter().zip(b) {
        assert!(a.0 == b.0 && close(a.1, b.1) && close(a.2, b.2), "{what}: {a:?} and {b:?}");
    }
}
