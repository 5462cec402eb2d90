//! Writes the event files of a live run on a separate thread.

use std::io::Read;
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender, TrySendError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use kiln_sys::words::number_of;
use kiln_sys::{LineReader, files};

use super::event::{self, Histogram, now};
use super::proto::Event;
use super::writer::{EventWriter, has_events};
use crate::line::Line;

/// Maximum number of queued events. Further events are dropped.
const MOST_WAITING: usize = 4096;

/// Maximum time that the end of a run waits for the disk.
const PATIENCE: Duration = Duration::from_secs(10);

/// Options of TensorBoard output.
#[derive(Clone, Debug)]
pub struct TensorBoardOptions {
    /// Folder of the event files.
    pub folder: PathBuf,
    /// The run's `metrics.jsonl`. Its existing lines are copied if there is no event file yet.
    pub metrics: PathBuf,
    /// Configuration as TOML.
    pub config: String,
    /// Number of completed steps.
    pub done: u64,
}

/// Writes a run's TensorBoard output on a separate thread, so that a slow or full disk does not block the run.
///
/// The first event creates the event file, and voids events of steps that the resumed run repeats.
pub struct TensorBoard {
    sender: Option<SyncSender<Entry>>,
    ended: Receiver<()>,
    thread: Option<JoinHandle<()>>,
    dropped: u64,
}

enum Entry {
    Line(String),
    Event(Event),
}

impl TensorBoard {
    /// Starts the thread. If that fails, logs a warning and returns `None`.
    pub fn start(options: TensorBoardOptions) -> Option<Self> {
        let length = std::fs::metadata(&options.metrics).map_or(0, |file| file.len());
        let (sender, entries) = mpsc::sync_channel(MOST_WAITING);
        let (end, ended) = mpsc::channel();
        let thread = thread::Builder::new().name("tensorboard".to_owned()).spawn(move || {
            let _end = end;
            Board { options, length, file: None, lost: 0 }.write(&entries);
        });
        match thread {
            Ok(thread) => Some(TensorBoard { sender: Some(sender), ended, thread: Some(thread), dropped: 0 }),
            Err(error) => {
                tracing::warn!(
                    "cannot create a thread for TensorBoard's files: {error}; the run continues without them"
                );
                None
            }
        }
    }

    /// Adds the numbers of a line of `metrics.jsonl`.
    pub fn line(&mut self, line: &str) {
        self.send(Entry::Line(line.to_owned()));
    }

    /// Adds a text, which TensorBoard shows verbatim.
    pub fn text(&mut self, step: u64, tag: &str, text: &str) {
        self.send(Entry::Event(event::text(now(), step, tag, text)));
    }

    /// Adds a histogram.
    pub fn histogram(&mut self, step: u64, tag: &str, histogram: Histogram) {
        self.send(Entry::Event(event::histogram(now(), step, tag, &histogram)));
    }

    fn send(&mut self, entry: Entry) {
        let Some(sender) = &self.sender else { return };
        if let Err(TrySendError::Full(_)) = sender.try_send(entry) {
            if self.dropped == 0 {
                tracing::warn!("the disk is too slow for TensorBoard's files: events are dropped");
            }
            self.dropped += 1;
        }
    }
}

impl Drop for TensorBoard {
    fn drop(&mut self) {
        self.sender = None;
        if self.ended.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!("the disk takes too long: TensorBoard's files lack the last events");
        } else if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        if self.dropped > 0 {
            tracing::warn!("TensorBoard's files lack {}", number_of(self.dropped, "dropped event"));
        }
    }
}

struct Board {
    options: TensorBoardOptions,
    length: u64,
    file: Option<EventWriter>,
    /// Number of entries lost because no file could be created.
    lost: u64,
}

impl Board {
    fn write(mut self, entries: &Receiver<Entry>) {
        for entry in entries {
            self.begin();
            let Some(file) = &mut self.file else {
                self.lost += 1;
                continue;
            };
            match entry {
                Entry::Line(line) => write_line(file, line.as_bytes()),
                Entry::Event(event) => file.write(&event),
            }
        }
        if self.lost > 0 {
            tracing::warn!("{} could not be written to TensorBoard's files", number_of(self.lost, "event"));
        }
    }

    fn begin(&mut self) {
        if self.file.is_some() {
            return;
        }
        let folder = &self.options.folder;
        // An empty `metrics.jsonl` means a new run.
        let first = if self.length == 0 { 0 } else { self.options.done + 1 };
        let created = has_events(folder).and_then(|has| Ok((has, EventWriter::create(folder, first)?)));
        match created {
            Ok((has_events, mut file)) => {
                if let Ok(config) = toml::from_str(&self.options.config) {
                    file.write(&event::settings(now(), config));
                }
                if !has_events {
                    self.catch_up(&mut file);
                }
                self.file = Some(file);
            }
            Err(error) if self.lost == 0 => {
                let folder = folder.display();
                tracing::warn!(
                    "cannot write TensorBoard's files to {folder}: {error}; the run continues without them"
                );
            }
            Err(_) => {}
        }
    }

    fn catch_up(&self, file: &mut EventWriter) {
        let read = || -> std::io::Result<()> {
            let metrics = files::open(&self.options.metrics)?;
            let mut lines = LineReader::new(metrics.take(self.length));
            while let Some(line) = lines.next_line()? {
                write_line(file, line);
            }
            Ok(())
        };
        if let Err(error) = { read }() {
            let path = self.options.metrics.display();
            tracing::warn!(
                "cannot read {path}: {error}; TensorBoard's files begin with this start of the run"
            );
        }
    }
}

fn write_line(file: &mut EventWriter, line: &[u8]) {
    let event = Line::read(line).and_then(|line| event::metrics(&line, now()));
    event.iter().for_each(|event| file.write(event));
}
