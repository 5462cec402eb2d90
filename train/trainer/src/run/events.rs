//! `events.jsonl`: the events of a run, including each time that it was started or resumed.

use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use kiln_observe::run::Event;
use kiln_sys::Lines;

use crate::error::TrainError;
use crate::metrics::unix_time;
use kiln_sys::files;

const EVENTS_FILE: &str = "events.jsonl";

/// Kind of the event recorded when a run ends with an error.
pub const FAILURE: &str = "failure";

const TAIL: u64 = 64 * 1024;

/// Returns the last event of the run in `out`, or `None` if none can be read.
pub fn last_event(out: &Path) -> Option<Event> {
    let mut file = files::open(&out.join(EVENTS_FILE)).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL))).ok()?;
    let mut tail = Vec::new();
    file.take(TAIL).read_to_end(&mut tail).ok()?;
    let mut lines = tail.split(|byte| *byte == b'\n').rev();
    // An incomplete line, as after a crash, does not parse.
    lines.find_map(|line| serde_json::from_slice(line).ok())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EventKind {
    Start,
    Resume,
    Checkpoint,
    Skipped,
    Stop,
    End,
    Failure,
}

impl EventKind {
    fn name(self) -> &'static str {
        match self {
            EventKind::Start => "start",
            EventKind::Resume => "resume",
            EventKind::Checkpoint => "checkpoint",
            EventKind::Skipped => "skipped",
            EventKind::Stop => "stop",
            EventKind::End => "end",
            EventKind::Failure => FAILURE,
        }
    }
}

/// Records the events of a run from this start on. Nothing is written before [`Events::open`].
#[derive(Default)]
pub(super) struct Events(Mutex<State>);

#[derive(Default)]
struct State {
    lines: Option<Lines>,
    step: u64,
}

impl Events {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn open(&self, out: &Path, step: u64) -> io::Result<()> {
        let lines = Lines::open(&out.join(EVENTS_FILE))?;
        *self.lock() = State { lines: Some(lines), step };
        Ok(())
    }

    pub(super) fn reach(&self, step: u64) {
        self.lock().step = step;
    }

    /// Writes an event at `step`. A failed write does not end the run.
    pub(super) fn note(&self, kind: EventKind, step: u64, text: &str) {
        let mut state = self.lock();
        let Some(lines) = &mut state.lines else { return };
        let event = Event { time: unix_time(), step, kind: kind.name().to_owned(), text: text.to_owned() };
        match serde_json::to_string(&event) {
            Ok(line) => lines.append(line),
            Err(error) => tracing::warn!("cannot record an event: {error}"),
        }
    }

    pub(super) fn fail(&self, error: &TrainError) {
        if error.is_stop() {
            return;
        }
        let (text, step) = (error.to_string(), self.lock().step);
        self.note(EventKind::Failure, step, text.lines().next().unwrap_or_default());
    }
}

impl std::fmt::Debug for Events {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Events")
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn events_go_on_over_starts() {
        let folder = tempfile::tempdir().unwrap();
        let events = Events::default();
        events.fail(&TrainError::usage("wrong"));
        assert!(!folder.path().join(EVENTS_FILE).exists());
        events.open(folder.path(), 0).unwrap();
        events.note(EventKind::Start, 0, "one");
        events.reach(3);
        events.fail(&TrainError::Stopped);
        events.fail(&TrainError::Drill("what went wrong\nand more of it".to_owned()));
        let again = Events::default();
        again.open(folder.path(), 2).unwrap();
        again.note(EventKind::Resume, 2, "two");
        let text = fs::read_to_string(folder.path().join(EVENTS_FILE)).unwrap();
        let read: Vec<Event> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let said: Vec<_> = read.iter().map(|event| (event.step, &*event.kind, &*event.text)).collect();
        assert_eq!(said, [(0, "start", "one"), (3, "failure", "what went wrong"), (2, "resume", "two")]);
        assert!(read.iter().all(|event| event.time > 1.7e9));
    }
}
