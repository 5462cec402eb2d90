//! The event files of a run that goes on, written beside it.

use std::io::Read;
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender, TrySendError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use kiln_process::words::number_of;
use kiln_storage::{LineReader, files};

use super::event::{Histogram, now};
use super::writer::{EventWriter, has_events};
use crate::line::Line;

/// Events that may wait for the disk. More are left out.
const MOST_WAITING: usize = 4096;

/// How long the end of a run waits for the disk.
const PATIENCE: Duration = Duration::from_secs(10);

/// What a run shows in TensorBoard.
#[derive(Clone, Debug)]
pub struct TensorBoardOptions {
    /// Folder of the event files.
    pub folder: PathBuf,
    /// The run's `metrics.jsonl`, in which there are the lines of the steps that are done. They are shown as well
    /// if there is no event file yet.
    pub metrics: PathBuf,
    /// The configuration, as TOML.
    pub config: String,
    /// Steps that are done.
    pub done: u64,
}

/// Writes what a run shows in TensorBoard, on a thread of its own: a disk that is slow or full holds nothing up,
/// and ends nothing.
///
/// The event file is begun with the first thing that is shown. What files of earlier starts have of steps that are
/// not done is void then, so that curves go on where the run does.
pub struct TensorBoard {
    sender: Option<SyncSender<Entry>>,
    ended: Receiver<()>,
    thread: Option<JoinHandle<()>>,
    left_out: u64,
}

enum Entry {
    Line(String),
    Text { time: f64, step: u64, tag: String, text: String },
    Histogram { time: f64, step: u64, tag: String, histogram: Histogram },
}

impl TensorBoard {
    /// Starts the thread. `None` if the system has none for it, which is told in the log.
    pub fn start(options: TensorBoardOptions) -> Option<Self> {
        // Lines that come now are told to the thread.
        let length = std::fs::metadata(&options.metrics).map_or(0, |file| file.len());
        let (sender, entries) = mpsc::sync_channel(MOST_WAITING);
        let (end, ended) = mpsc::channel();
        let thread = thread::Builder::new().name("tensorboard".to_owned()).spawn(move || {
            let _end = end;
            Board { options, length, file: None, lost: 0 }.write(&entries);
        });
        match thread {
            Ok(thread) => {
                Some(TensorBoard { sender: Some(sender), ended, thread: Some(thread), left_out: 0 })
            }
            Err(error) => {
                tracing::warn!("no thread for TensorBoard's files: {error}; the run goes on without them");
                None
            }
        }
    }

    /// Shows the numbers of a line of `metrics.jsonl`.
    pub fn line(&mut self, line: &str) {
        self.send(Entry::Line(line.to_owned()));
    }

    /// Shows a text of `step`, as it is.
    pub fn text(&mut self, step: u64, tag: &str, text: &str) {
        self.send(Entry::Text { time: now(), step, tag: tag.to_owned(), text: text.to_owned() });
    }

    /// Shows a histogram of `step`.
    pub fn histogram(&mut self, step: u64, tag: &str, histogram: Histogram) {
        self.send(Entry::Histogram { time: now(), step, tag: tag.to_owned(), histogram });
    }

    fn send(&mut self, entry: Entry) {
        let Some(sender) = &self.sender else { return };
        if let Err(TrySendError::Full(_)) = sender.try_send(entry) {
            if self.left_out == 0 {
                tracing::warn!("the disk does not keep up with TensorBoard's files: events are left out");
            }
            self.left_out += 1;
        }
    }
}

impl Drop for TensorBoard {
    fn drop(&mut self) {
        self.sender = None;
        if self.ended.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!("the disk takes too long: TensorBoard's files lack the last events");
        } else if let Some(thread) = self.thread.take() {
            // It has told of its end; a panic has been told as well.
            let _ = thread.join();
        }
        if self.left_out > 0 {
            tracing::warn!("{} left out of TensorBoard's files", number_of(self.left_out, "event"));
        }
    }
}

/// What the thread has.
struct Board {
    options: TensorBoardOptions,
    /// Bytes of `metrics.jsonl` when the run began.
    length: u64,
    file: Option<EventWriter>,
    /// Entries that came while no file could be created.
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
                Entry::Line(line) => {
                    Line::read(line.as_bytes()).iter().for_each(|line| file.metrics(line, now()));
                }
                Entry::Text { time, step, tag, text } => file.text(time, step, &tag, &text),
                Entry::Histogram { time, step, tag, histogram } => {
                    file.histogram(time, step, &tag, &histogram);
                }
            }
        }
        if self.lost > 0 {
            tracing::warn!("{} could not be written to TensorBoard's files", number_of(self.lost, "event"));
        }
    }

    /// Begins the event file, if there is none yet.
    fn begin(&mut self) {
        if self.file.is_some() {
            return;
        }
        let folder = &self.options.folder;
        // Without any line, nothing in this folder leads to where the run is.
        let first = if self.length == 0 { 0 } else { self.options.done + 1 };
        let created = has_events(folder).and_then(|has| Ok((has, EventWriter::create(folder, first)?)));
        match created {
            Ok((has_events, mut file)) => {
                if let Ok(config) = toml::from_str(&self.options.config) {
                    file.settings(now(), config);
                }
                if !has_events {
                    self.catch_up(&mut file);
                }
                self.file = Some(file);
            }
            Err(error) if self.lost == 0 => {
                let folder = folder.display();
                tracing::warn!(
                    "cannot write TensorBoard's files to {folder}: {error}; the run goes on without them"
                );
            }
            Err(_) => {}
        }
    }

    /// Writes the lines that were there when the run began.
    fn catch_up(&self, file: &mut EventWriter) {
        let read = || -> std::io::Result<()> {
            let metrics = files::open(&self.options.metrics)?;
            let mut lines = LineReader::new(metrics.take(self.length));
            while let Some(line) = lines.next_line()? {
                Line::read(line).iter().for_each(|line| file.metrics(line, now()));
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
