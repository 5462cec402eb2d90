//! A run folder, read while it grows.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use kiln_sys::files;
use serde::{Deserialize, Serialize};
use toml::Value;

use super::RunError;
use super::find::is_run;
use super::metrics::Metrics;
use super::tail::{Change, Tail};
use crate::config::flatten;

/// Maximum size of a configuration file.
const MOST_CONFIG: u64 = 1 << 20;

/// Text that a run has generated: a line of `samples.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Optimizer step after which the text was generated.
    pub step: u64,
    /// The prompt.
    pub prompt: String,
    /// The model's continuation.
    pub text: String,
}

/// An event of a run: a line of `events.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// Time in seconds since 1970 (UTC).
    pub time: f64,
    /// The last completed optimizer step.
    pub step: u64,
    /// The kind of event: `start`, `resume`, `checkpoint`, `skipped`, `stop`, `end` or `failure`.
    pub kind: String,
    /// A description for people.
    pub text: String,
}

/// A run, as read from its folder.
#[derive(Clone, Debug)]
pub struct Run {
    folder: PathBuf,
    name: String,
    config: BTreeMap<String, String>,
    metrics: Metrics,
    samples: Vec<Sample>,
    events: Vec<Event>,
    invalid: u64,
    /// Files that could not be read, with the reason.
    unread: BTreeMap<PathBuf, String>,
    /// The files of the metrics, samples and events.
    files: [Tail; 3],
}

impl Run {
    /// Reads the run in `folder`, which is a run folder.
    ///
    /// # Errors
    ///
    /// If there is no run. [`Run::problems`] lists what cannot be read of a run.
    pub fn open(folder: &Path) -> Result<Run, RunError> {
        if !is_run(folder) {
            let why = if folder.exists() { "it has no run.json" } else { "it does not exist" };
            return Err(RunError::NoRun { path: folder.to_owned(), why: why.to_owned() });
        }
        let mut run = Run {
            folder: folder.to_owned(),
            name: name_of(folder),
            config: BTreeMap::new(),
            metrics: Metrics::default(),
            samples: Vec::new(),
            events: Vec::new(),
            invalid: 0,
            unread: BTreeMap::new(),
            files: ["metrics.jsonl", "samples.jsonl", "events.jsonl"]
                .map(|file| Tail::new(folder.join(file))),
        };
        run.refresh();
        Ok(run)
    }

    /// Reads content added since the last call. Returns true if there is anything new.
    pub fn refresh(&mut self) -> bool {
        let Run { metrics, samples, events, invalid, unread, files, .. } = self;
        let [metrics_file, samples_file, events_file] = &mut *files;
        let read = [
            metrics_file.read(|line| match line {
                None => *metrics = Metrics::default(),
                Some(line) => *invalid += u64::from(!line.is_empty() && !metrics.add(line)),
            }),
            samples_file.read(|line| *invalid += add(samples, line)),
            events_file.read(|line| *invalid += add(events, line)),
        ];
        let mut is_new = false;
        for (read, file) in read.into_iter().zip(files) {
            match read {
                Ok(change) => {
                    is_new |= change != Change::None;
                    unread.remove(file.path());
                }
                Err(error) => is_new |= unread.insert(file.path().to_owned(), error.to_string()).is_none(),
            }
        }
        is_new | self.read_config()
    }

    fn read_config(&mut self) -> bool {
        let path = self.folder.join("config.toml");
        let read = files::read(&path, MOST_CONFIG).map_err(|error| error.to_string()).and_then(|text| {
            let text = String::from_utf8(text).map_err(|error| error.to_string())?;
            toml::from_str::<toml::Table>(&text).map_err(|error| error.message().to_owned())
        });
        match read {
            Ok(table) => {
                let text = |value| match value {
                    Value::String(text) => text,
                    value => value.to_string(),
                };
                let config: BTreeMap<_, _> =
                    flatten(table).into_iter().map(|(key, value)| (key, text(value))).collect();
                self.unread.remove(&path);
                let is_new = config != self.config;
                self.config = config;
                is_new
            }
            Err(why) => self.unread.insert(path, why).is_none(),
        }
    }

    /// Returns the folder, as the caller named it.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the name of the folder.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the resolved configuration: keys such as `optim.lr`, with their values as in TOML.
    pub fn config(&self) -> &BTreeMap<String, String> {
        &self.config
    }

    /// Returns the number of optimizer steps of the run, from its configuration.
    pub fn steps(&self) -> Option<u64> {
        self.config.get("train.steps")?.parse().ok()
    }

    /// Returns the metrics of the run.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Samples that the run has generated, in order.
    pub fn samples(&self) -> &[Sample] {
        &self.samples
    }

    /// Returns the events of the run, in order.
    pub fn events(&self) -> &[Event] {
        &self.events
    }

    /// Describes the parts of the folder that could not be read, in sentences for people.
    pub fn problems(&self) -> Vec<String> {
        let unread = self.unread.iter().map(|(path, why)| format!("{}: {why}", path.display()));
        let mut problems: Vec<String> = unread.collect();
        let [metrics, ..] = &self.files;
        if !metrics.has_been_read() && !self.unread.contains_key(metrics.path()) {
            problems.push(format!("{}: no metrics.jsonl yet", self.folder.display()));
        }
        if self.invalid > 0 {
            let lines = kiln_sys::words::number_of(self.invalid, "line");
            problems.push(format!("{}: skipped {lines} that this build cannot read", self.folder.display()));
        }
        problems
    }
}

/// Returns the name of the folder, even for `.` and `..`.
fn name_of(folder: &Path) -> String {
    absolute(folder).file_name().map_or_else(|| "run".to_owned(), |name| name.to_string_lossy().into_owned())
}

fn absolute(folder: &Path) -> PathBuf {
    folder.canonicalize().unwrap_or_else(|_| folder.to_owned())
}

/// Returns a name for each of the runs in `folders`: that of its folder, or its path where two have the same
/// name.
pub(crate) fn distinct_names<'a>(folders: impl IntoIterator<Item = &'a Path>) -> Vec<String> {
    let folders: Vec<_> = folders.into_iter().map(|folder| (folder, name_of(folder))).collect();
    let distinct = |(folder, name): &(&Path, String)| {
        let is_only = folders.iter().filter(|(_, other)| other == name).count() < 2;
        match folder.file_name() {
            _ if is_only => name.clone(),
            Some(_) => folder.display().to_string(),
            None => absolute(folder).display().to_string(),
        }
    };
    folders.iter().map(distinct).collect()
}

/// Adds the object in `line` to the list, or clears the list without a line. Returns the number of invalid lines.
fn add<T: for<'a> Deserialize<'a>>(list: &mut Vec<T>, line: Option<&[u8]>) -> u64 {
    match line.map(|line| (line, serde_json::from_slice(line))) {
        None => list.clear(),
        Some((_, Ok(object))) => list.push(object),
        Some((line, Err(_))) => return u64::from(!line.is_empty()),
    }
    0
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;

    use super::super::find_runs;
    use super::*;

    #[test]
    fn run_is_read_as_far_as_it_goes() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("one");
        fs::create_dir(&folder).unwrap();
        assert!(Run::open(&folder).is_err() && find_runs(std::slice::from_ref(&folder)).is_err());
        fs::write(folder.join("run.json"), "{").unwrap();
        let mut run = Run::open(&folder).unwrap();
        assert_eq!((run.name(), run.steps(), run.problems().len()), ("one", None, 2), "{:?}", run.problems());
        assert!(run.problems()[1].ends_with(": no metrics.jsonl yet"), "{:?}", run.problems());
        fs::write(folder.join("config.toml"), "[train]\nsteps = 5\n[[optim.groups]]\nmatch = [\"a\"]\n")
            .unwrap();
        fs::write(folder.join("metrics.jsonl"), "{\"step\":1,\"loss\":2.0}\nwhat\n{\"step\":2,\"lo").unwrap();
        fs::write(folder.join("samples.jsonl"), "{\"step\":1,\"prompt\":\"a\",\"text\":\"b\",\"new\":1}\n")
            .unwrap();
        assert!(run.refresh() && !run.refresh());
        assert_eq!((run.steps(), run.config()["optim.groups.0.match"].as_str()), (Some(5), "[\"a\"]"));
        assert_eq!((run.metrics().last_step(), run.samples().len(), run.problems().len()), (Some(1), 1, 1));
        let mut file = fs::OpenOptions::new().append(true).open(folder.join("metrics.jsonl")).unwrap();
        file.write_all(b"ss\":1.5}\n").unwrap();
        assert!(run.refresh());
        assert_eq!(run.metrics().get("loss").unwrap().values(), [2.0, 1.5]);
        assert_eq!(find_runs(&[root.path().to_owned(), folder.clone()]).unwrap(), [folder]);
    }
}
