//! Background threads that read one run each, so that a run that hangs does not block keys or other runs.

use std::collections::BTreeMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, SendError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use super::gauges::{CpuMeter, Gauges, GpuMeter, gauges};
use super::logs::{LogLine, Logs};
use crate::page::Progress;
use crate::run::{Run, find_runs};
use crate::status::{Look, LookAt, State};

const EVERY: Duration = Duration::from_secs(1);

const FIND_EVERY: Duration = Duration::from_secs(3);

/// A finished run is asked only every fifth time, because it may be resumed.
const OVER: u64 = 5;

pub(super) enum Update {
    /// State of the run with this index. A new run has the next index.
    Run(usize, Box<Snapshot>),
    Problems(Vec<String>),
    Panicked,
}

/// The state of a run at one moment. Cloning is cheap.
#[derive(Clone, Debug, Default)]
pub(super) struct Snapshot {
    pub folder: PathBuf,
    pub run: Option<Arc<Run>>,
    pub problems: Vec<String>,
    pub progress: Progress,
    pub look: Option<Arc<Look>>,
    /// The error of the last attempt to ask the processes.
    pub look_error: Option<String>,
    /// Time of `look`.
    pub looked: Option<Instant>,
    pub log: Arc<Vec<LogLine>>,
    /// Load of the processes on this machine, by rank.
    pub gauges: Arc<BTreeMap<usize, Gauges>>,
}

impl Snapshot {
    pub(super) fn new(folder: PathBuf) -> Snapshot {
        Snapshot { folder, ..Snapshot::default() }
    }

    pub(super) fn state(&self) -> Option<State> {
        self.look.as_ref().map(|look| look.state)
    }

    pub(super) fn set_run(&mut self, run: &Run) {
        self.problems = run.problems();
        self.run = Some(Arc::new(run.clone()));
        self.update_progress();
    }

    pub(super) fn set_look(&mut self, look: Result<Look, String>, now: Instant) {
        match look {
            Ok(look) => {
                (self.look, self.looked, self.look_error) = (Some(Arc::new(look)), Some(now), None);
                self.update_progress();
            }
            Err(error) => self.look_error = Some(error),
        }
    }

    fn update_progress(&mut self) {
        if let Some(run) = &self.run {
            self.progress = Progress::new(run, self.look.as_deref());
            // A run that hangs or does not answer may never end.
            let is_running = self.state().is_some_and(|state| !state.is_bad());
            self.progress.eta_s = self.progress.eta_s.filter(|_| is_running);
        }
    }
}

/// Starts to watch the runs in `paths`: run folders, or folders of run folders. Fails if no thread can be started.
/// The threads end when the receiver is dropped.
pub(super) fn start(paths: Vec<PathBuf>, look_at: LookAt) -> io::Result<Receiver<Update>> {
    let (sender, updates) = mpsc::channel();
    spawn(sender, move |updates| find(&paths, &look_at, updates))?;
    Ok(updates)
}

fn spawn(
    updates: Sender<Update>,
    work: impl FnOnce(&Sender<Update>) -> Result<(), SendError<Update>> + Send + 'static,
) -> io::Result<()> {
    let body = move || {
        if catch_unwind(AssertUnwindSafe(|| work(&updates))).is_err() {
            // An error means that the receiver was dropped.
            let _ = updates.send(Update::Panicked);
        }
    };
    thread::Builder::new().name("kiln-watch".to_owned()).spawn(body).map(drop)
}

fn find(paths: &[PathBuf], look_at: &LookAt, updates: &Sender<Update>) -> Result<(), SendError<Update>> {
    let gpus = Arc::new(GpuMeter::new());
    let mut known: Vec<PathBuf> = Vec::new();
    loop {
        let mut problems = Vec::new();
        for path in paths {
            let found = find_runs(std::slice::from_ref(path));
            problems.extend(found.as_ref().err().map(ToString::to_string));
            for folder in found.into_iter().flatten() {
                if known.contains(&folder) {
                    continue;
                }
                let number = known.len();
                known.push(folder.clone());
                updates.send(Update::Run(number, Box::new(Snapshot::new(folder.clone()))))?;
                let (look_at, gpus) = (Arc::clone(look_at), Arc::clone(&gpus));
                let started =
                    spawn(updates.clone(), move |updates| follow(number, &folder, &look_at, &gpus, updates));
                problems.extend(started.err().map(|error| format!("cannot start a thread: {error}")));
            }
        }
        updates.send(Update::Problems(problems))?;
        thread::sleep(FIND_EVERY);
    }
}

fn follow(
    number: usize,
    folder: &Path,
    look_at: &LookAt,
    gpus: &GpuMeter,
    updates: &Sender<Update>,
) -> Result<(), SendError<Update>> {
    let mut known = Snapshot::new(folder.to_owned());
    let (mut run, mut logs, mut cpu) = (None, Logs::new(folder), CpuMeter::default());
    for round in 0u64.. {
        let start = Instant::now();
        let is_new = match &mut run {
            None => match Run::open(folder) {
                Ok(opened) => run.insert(opened).folder().exists(),
                Err(error) => {
                    known.problems = vec![error.to_string()];
                    false
                }
            },
            Some(run) => run.refresh(),
        };
        if let Some(run) = run.as_ref().filter(|_| is_new) {
            known.set_run(run);
        }
        if let Some(log) = logs.refresh() {
            known.log = log;
        }
        updates.send(Update::Run(number, Box::new(known.clone())))?;
        if !known.state().is_some_and(State::is_over) || round.is_multiple_of(OVER) {
            let look = look_at(folder);
            known.gauges =
                Arc::new(look.as_ref().map(|look| gauges(look, &mut cpu, gpus)).unwrap_or_default());
            known.set_look(look, Instant::now());
            updates.send(Update::Run(number, Box::new(known.clone())))?;
        }
        thread::sleep(EVERY.saturating_sub(start.elapsed()));
    }
    Ok(())
}
