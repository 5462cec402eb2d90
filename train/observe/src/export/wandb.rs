//! Runs as those that Weights & Biases writes offline, which `wandb sync` takes.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufWriter};
use std::path::{Path, PathBuf};

use kiln_process::words::time_at;
use prost::Message;

use super::error::ExportError;
use super::folder::fill;
use super::leveldb::Log;
use super::run::{Exported, runs};
use super::wandb_proto::{
    Exit, Header, History, Item, Record, RunRecord, Step, Summary, Timestamp, VersionInfo, What,
};
use crate::line::{Line, Value, is_text};

/// The project that runs are in, unless `wandb sync --project` names another.
const PROJECT: &str = "kiln";

/// The versions of wandb that have the records which are written here: the one that they are checked with, and the
/// oldest that reads them.
const VERSIONS: (&str, &str) = ("0.19.11", "0.40.0");

/// Writes each of the runs in `folders` as an offline run of Weights & Biases in `out`: its configuration, a row of
/// history for each step, and the last values. Returns the folders, which `wandb sync` takes.
///
/// # Errors
///
/// If a folder is no run or has no metrics, or not everything can be written.
pub fn wandb_offline(folders: &[PathBuf], out: &Path) -> Result<Vec<PathBuf>, ExportError> {
    let of_run = |run: Result<Exported, ExportError>| {
        let run = run?;
        let (begin, id) = (run.time(0), run.id.clone());
        let digits = |text: &str| text.chars().filter(char::is_ascii_digit).collect::<String>();
        let begun = time_at(begin as u64);
        let (date, time) = begun.split_once('T').unwrap_or((&begun, ""));
        // Without the milliseconds.
        let (date, time) = (digits(date), digits(time.split('.').next().unwrap_or_default()));
        let folder = out.join(format!("offline-run-{date}_{time}-{id}"));
        fill(folder, |folder| write(&run, &id, &folder.join(format!("run-{id}.wandb"))))
    };
    runs(folders).map(of_run).collect()
}

fn write(run: &Exported, id: &str, path: &Path) -> io::Result<()> {
    let mut log = Log::new(BufWriter::new(File::create_new(path)?))?;
    let mut num = 0;
    let mut append = |what: What| {
        num += 1;
        log.append(&Record { num, what: Some(what) }.encode_to_vec())
    };
    let begin = run.time(0);
    let (producer, min_consumer) = (VERSIONS.0.to_owned(), VERSIONS.1.to_owned());
    append(What::Header(Header { version_info: Some(VersionInfo { producer, min_consumer }) }))?;
    append(What::Run(RunRecord {
        run_id: id.to_owned(),
        project: PROJECT.to_owned(),
        config: Some(config(run)),
        display_name: run.name.clone(),
        start_time: Some(Timestamp { seconds: begin as i64, nanos: (begin.fract() * 1e9) as i32 }),
    }))?;
    let mut last: BTreeMap<&str, String> = BTreeMap::new();
    let (mut index, mut runtime) = (0, 0.0);
    // An evaluation has a line of its own.
    for lines in run.lines.chunk_by(|one, next| one.step == next.step) {
        let time = run.time(index);
        (index, runtime) = (index + lines.len(), time - begin);
        let mut row: Vec<(&str, String)> = lines.iter().flat_map(values).collect();
        row.extend([
            ("_step", lines[0].step.to_string()),
            ("_timestamp", time.to_string()),
            ("_runtime", runtime.to_string()),
        ]);
        last.extend(row.iter().cloned());
        let item = row.into_iter().map(|(key, value)| named(key, value)).collect();
        append(What::History(History { item, step: Some(Step { num: lines[0].step as i64 }) }))?;
    }
    let update = last.into_iter().map(|(key, value)| named(key, value)).collect();
    append(What::Summary(Summary { update }))?;
    append(What::Exit(Exit { exit_code: 0, runtime: runtime as i32 }))?;
    let file = log.finish()?.into_inner().map_err(io::IntoInnerError::into_error)?;
    file.sync_all()
}

/// Keys of a line and their values as JSON.
fn values(line: &Line) -> impl Iterator<Item = (&str, String)> {
    line.values.iter().filter_map(|(key, value)| {
        let value = match value {
            Value::Null if is_text(key) => return None,
            // As wandb writes it, with Python's `json`.
            Value::Null => "NaN".to_owned(),
            Value::Number(json) | Value::Other(json) => json.clone(),
            Value::Text(text) => json(text),
        };
        Some((key.as_str(), value))
    })
}

/// The sections of the configuration.
fn config(run: &Exported) -> Summary {
    let section = |(name, value): (&String, &toml::Value)| {
        named(name, serde_json::to_string(value).unwrap_or_else(|_| json(&value.to_string())))
    };
    Summary { update: run.config.iter().map(section).collect() }
}

fn named(key: &str, value_json: String) -> Item {
    Item { nested_key: vec![key.to_owned()], value_json }
}

fn json(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
