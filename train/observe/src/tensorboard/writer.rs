//! A file of events.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use kiln_storage::Records;
use prost::Message;
use toml::Table;

use super::event::{self, Histogram, now};
use super::proto::Event;
use super::record::framed;
use crate::config::flatten;
use crate::line::Line;

/// What the name of every event file begins with; seconds since 1970 follow.
const PREFIX: &str = "events.out.tfevents.";

/// Writes an event file. An event that cannot be written leaves no part of itself, and is told of in the log.
pub struct EventWriter {
    records: Records,
}

impl EventWriter {
    /// Begins another event file in `folder`, which is created if it is not there. What files that are there
    /// already have of the step `first` and later ones is void from now on, to whoever reads them.
    ///
    /// # Errors
    ///
    /// If the folder or the file cannot be created.
    pub fn create(folder: &Path, first: u64) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        let mut writer = EventWriter { records: Records::open(&next_file(folder)?, "event")? };
        let time = now();
        writer.write(&event::version(time));
        writer.write(&event::start(time, first));
        Ok(writer)
    }

    /// Writes the numbers of a line of `metrics.jsonl`. If the line does not say when it was written, it was at
    /// `time`.
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

    /// Writes the configuration of a run, which TensorBoard shows under "HParams". It is once there for a folder:
    /// TensorBoard reads the first.
    pub(crate) fn settings(&mut self, time: f64, config: Table) {
        self.write(&event::settings(time, flatten(config)));
    }

    fn write(&mut self, event: &Event) {
        self.records.append(&framed(&event.encode_to_vec()));
    }
}

/// Whether there are event files in `folder`.
pub(crate) fn has_events(folder: &Path) -> io::Result<bool> {
    Ok(last_time(folder)?.is_some())
}

/// The path of the next event file in `folder`: by its name it comes after those that are there, in whose order
/// TensorBoard reads them.
fn next_file(folder: &Path) -> io::Result<PathBuf> {
    let last = last_time(folder)?;
    let seconds = (now() as u64).max(last.map_or(0, |last| last + 1));
    let host = rustix::system::uname();
    let host = host.nodename().to_string_lossy();
    let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.';
    let host: String = host.chars().map(|c| if is_plain(c) { c } else { '_' }).collect();
    Ok(folder.join(format!("{PREFIX}{seconds:010}.{host}.{}.0", std::process::id())))
}

/// The time in the name of the last event file in `folder`.
fn last_time(folder: &Path) -> io::Result<Option<u64>> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let time = |entry: fs::DirEntry| {
        let name = entry.file_name().into_string().ok()?;
        name.strip_prefix(PREFIX)?.split('.').next()?.parse::<u64>().ok()
    };
    Ok(entries.flatten().filter_map(time).max())
}
