//! A file of events.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use kiln_storage::Records;
use prost::Message;
use toml::Table;

use super::cut::cut;
use super::event::{self, Histogram, now};
use super::proto::Event;
use super::record::framed;
use crate::config::flatten;
use crate::line::Line;

/// The beginning of every event file's name; seconds since 1970 follow.
const PREFIX: &str = "events.out.tfevents.";

/// The end of the names of event files written by Kiln.
const SUFFIX: &str = ".kiln";

/// Writes an event file. An event that cannot be written leaves no partial record, and is logged.
pub struct EventWriter {
    records: Records,
    /// Records that must come before all others, until they are written.
    first: Vec<u8>,
}

impl EventWriter {
    /// Creates another event file in `folder`, which is created if necessary. Events of the step `first` and
    /// later ones are removed from existing files, and declared void for readers that have already read them.
    ///
    /// # Errors
    ///
    /// If the folder or the file cannot be created, or existing files cannot be truncated.
    pub fn create(folder: &Path, first: u64) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        let files = event_files(folder)?;
        // Files of other programs are untouched, and so are all files when a run begins: they may belong to
        // another run.
        let is_ours = |path: &Path| path.to_string_lossy().ends_with(SUFFIX);
        let mut earlier = files.iter().filter(|(_, path)| first > 0 && is_ours(path));
        earlier.try_for_each(|(_, path)| cut(path, first))?;
        let (records, time) = (Records::open(&next_file(folder, &files), "event")?, now());
        let first = [event::version(time), event::start(time, first)];
        let first = first.iter().flat_map(|event| framed(&event.encode_to_vec())).collect();
        Ok(EventWriter { records, first })
    }

    /// Writes the numbers of a line of `metrics.jsonl`; `time` is used if the line does not record when it
    /// was written.
    pub(crate) fn metrics(&mut self, line: &Line, time: f64) {
        event::metrics(line, time).iter().for_each(|event| self.write(event));
    }

    /// Writes a text of `step`.
    pub(crate) fn text(&mut self, time: f64, step: u64, tag: &str, text: &str) {
        self.write(&event::text(time, step, tag, text));
    }

    /// Writes a histogram of `step`.
    pub(crate) fn histogram(&mut self, time: f64, step: u64, tag: &str, histogram: &Histogram) {
        self.write(&event::histogram(time, step, tag, histogram));
    }

    /// Writes the configuration of a run, which TensorBoard shows under "HParams". Written once per folder:
    /// TensorBoard reads only the first.
    pub(crate) fn settings(&mut self, time: f64, config: Table) {
        self.write(&event::settings(time, flatten(config)));
    }

    /// Closes the file.
    ///
    /// # Errors
    ///
    /// If any event could not be written.
    pub(crate) fn finish(self) -> io::Result<()> {
        self.records.finish()
    }

    fn write(&mut self, event: &Event) {
        let record = framed(&event.encode_to_vec());
        if self.first.is_empty() {
            self.records.append(&record);
        } else if self.records.append(&[&self.first[..], &record].concat()) {
            self.first.clear();
        }
    }
}

/// Returns true if there are event files in `folder`.
pub(crate) fn has_events(folder: &Path) -> io::Result<bool> {
    Ok(!event_files(folder)?.is_empty())
}

/// Returns a path for the next event file next to `files`: it sorts after them by name, the order in which
/// TensorBoard reads them.
fn next_file(folder: &Path, files: &[(u64, PathBuf)]) -> PathBuf {
    let last = files.iter().map(|(time, _)| *time).max();
    let seconds = (now() as u64).max(last.map_or(0, |last| last + 1));
    let host = rustix::system::uname();
    let host = host.nodename().to_string_lossy();
    let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.';
    let host: String = host.chars().map(|c| if is_plain(c) { c } else { '_' }).collect();
    folder.join(format!("{PREFIX}{seconds:010}.{host}.{}.0{SUFFIX}", std::process::id()))
}

/// Returns the event files in `folder`, each with the time in its name.
fn event_files(folder: &Path) -> io::Result<Vec<(u64, PathBuf)>> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let event_file = |entry: fs::DirEntry| {
        let name = entry.file_name().into_string().ok()?;
        let time = name.strip_prefix(PREFIX)?.split('.').next()?.parse().ok()?;
        Some((time, entry.path()))
    };
    Ok(entries.flatten().filter_map(event_file).collect())
}
