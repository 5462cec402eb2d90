//! A file of events.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, ErrorKind, Read};
use std::path::{Path, PathBuf};

use kiln_sys::{Records, files};
use prost::Message;
use toml::Table;

use super::event::{self, Histogram, now};
use super::proto::{Event, What};
use super::record::{HEADER, TRAILER, framed, length};
use crate::config::flatten;
use crate::line::Line;

/// The start of the name of every event file; seconds since 1970 follow.
const PREFIX: &str = "events.out.tfevents.";

/// The end of the names of files that are written here.
const SUFFIX: &str = ".kiln";

/// A longer record is not one of ours.
const MOST_RECORD: u64 = 1 << 30;

/// Writes an event file. An event that cannot be written leaves no part of itself; the log reports it.
pub struct EventWriter {
    records: Records,
    /// Records that must come before all others, until they are written.
    first: Vec<u8>,
}

impl EventWriter {
    /// Starts another event file in `folder`, which is created if it does not exist. Events of the step `first` and
    /// later ones are cut off from existing files, and marked as void for programs that have read them.
    ///
    /// # Errors
    ///
    /// If the folder or the file cannot be created, or existing files cannot be cut.
    pub fn create(folder: &Path, first: u64) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        let existing = event_files(folder)?;
        // Files of other programs stay, and so does everything when a run starts: it may belong to another run.
        let is_ours = |path: &Path| path.to_string_lossy().ends_with(SUFFIX);
        let mut earlier = existing.iter().filter(|(_, path)| first > 0 && is_ours(path));
        earlier.try_for_each(|(_, path)| cut(path, first))?;
        let (records, time) = (Records::open(&next_file(folder, &existing), "event")?, now());
        let first = [event::version(time), event::start(time, first)];
        let first = first.iter().flat_map(|event| framed(&event.encode_to_vec())).collect();
        Ok(EventWriter { records, first })
    }

    /// Writes the numbers of a line of `metrics.jsonl`. `time` stands for a time that the line does not have.
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

    /// Writes the configuration of a run, which TensorBoard shows under "HParams". One for each folder: TensorBoard
    /// reads the first.
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

/// A path for the next event file. TensorBoard reads files in the order of their names, so it comes after `existing`.
fn next_file(folder: &Path, existing: &[(u64, PathBuf)]) -> PathBuf {
    let last = existing.iter().map(|(time, _)| *time).max();
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

/// Ends the event file at `path` before its first event of the step `first` or a later one, and before an incomplete
/// record. No event of an earlier step is lost: a run writes all events of a step that has a checkpoint before it
/// starts the next.
///
/// The next file marks these events as void, too. TensorBoard's fast loader ignores that, unless other points replace
/// them.
pub(super) fn cut(path: &Path, first: u64) -> io::Result<()> {
    let file = files::open_with(OpenOptions::new().read(true).write(true), path)?;
    let (mut reader, all) = (BufReader::new(&file), file.metadata()?.len());
    let mut end = 0;
    while let Some(record) = next(&mut reader)? {
        let is_void = match Event::decode(&record[HEADER..record.len() - TRAILER]) {
            Ok(Event { step, what: Some(What::Summary(_)), .. }) => {
                u64::try_from(step).is_ok_and(|step| step >= first)
            }
            // The version of the file, or an event of another program.
            _ => false,
        };
        if is_void {
            break;
        }
        end += record.len() as u64;
    }
    if end < all {
        file.set_len(end)?;
    }
    Ok(())
}

/// The next whole record with its header and trailer, if there is one.
fn next(from: &mut BufReader<&File>) -> io::Result<Option<Vec<u8>>> {
    let mut record = Vec::new();
    from.by_ref().take(HEADER as u64).read_to_end(&mut record)?;
    let Some(length) = length(&record).filter(|length| *length <= MOST_RECORD) else { return Ok(None) };
    let rest = length + TRAILER as u64;
    let read = from.by_ref().take(rest).read_to_end(&mut record)?;
    Ok((read as u64 == rest).then_some(record))
}
