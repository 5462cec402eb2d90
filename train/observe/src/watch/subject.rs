//! A run as it is shown: what is known of it at this moment, cheap to hand from one thread to another.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Instant;

use crate::run::{Event, Run, Sample};
use crate::status::{Look, State};

/// A run that is watched. Threads that look at it write here; the one that draws reads.
#[derive(Debug)]
pub struct Subject {
    folder: PathBuf,
    /// `None` until the folder has been read.
    run: Mutex<Option<Run>>,
    news: Mutex<News>,
}

/// What is known of a run, apart from its metrics.
#[derive(Clone, Debug, Default)]
pub struct News {
    /// Counts what has changed in the folder.
    pub version: u64,
    /// What its processes said last.
    pub look: Option<Arc<Look>>,
    /// Why there was no look the last time.
    pub look_error: Option<String>,
    /// When that look ended.
    pub looked: Option<Instant>,
    /// What is in the folder.
    pub folder: Arc<FolderFacts>,
    /// Output of its processes, in the order in which it came.
    pub log: Arc<Vec<LogLine>>,
    /// Load of the machine, by rank.
    pub gauges: Arc<BTreeMap<usize, Gauges>>,
}

/// What a run folder says, apart from metrics.
#[derive(Clone, Debug, Default)]
pub struct FolderFacts {
    /// Configuration, by dotted key.
    pub config: BTreeMap<String, String>,
    /// Texts that the run has generated.
    pub samples: Vec<Sample>,
    /// What has happened to it.
    pub events: Vec<Event>,
    /// What could not be read.
    pub problems: Vec<String>,
}

/// How busy a rank's process and GPU are. `None` is not known here.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Gauges {
    /// CPU time of the rank's process as a share of one core: 2 means two cores.
    pub cpu: Option<f64>,
    /// Share of the time in which the GPU had work.
    pub gpu: Option<f64>,
    /// Temperature of the GPU, in degrees Celsius.
    pub celsius: Option<f64>,
}

/// A line that a rank has written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogLine {
    /// The rank.
    pub rank: usize,
    /// Whether it went to standard error.
    pub is_error: bool,
    /// The line, as it was written.
    pub text: Arc<str>,
}

impl Subject {
    /// The run in `folder`, of which nothing is known yet.
    pub fn new(folder: PathBuf) -> Self {
        Subject { folder, run: Mutex::new(None), news: Mutex::default() }
    }

    /// The run folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What is known.
    pub fn news(&self) -> News {
        lock(&self.news).clone()
    }

    /// Changes what is known.
    pub fn tell(&self, change: impl FnOnce(&mut News)) {
        change(&mut lock(&self.news));
    }

    /// The files of the run, for the thread that reads them.
    pub fn files(&self) -> MutexGuard<'_, Option<Run>> {
        lock(&self.run)
    }

    /// Shows the run to `see`, unless it is being read right now or has not been read yet: a file system that hangs
    /// must not hold up whoever draws.
    pub fn see<T>(&self, see: impl FnOnce(&Run) -> T) -> Option<T> {
        match self.run.try_lock() {
            Ok(run) => run.as_ref().map(see),
            Err(TryLockError::Poisoned(run)) => run.into_inner().as_ref().map(see),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

impl FolderFacts {
    /// What `run` says.
    pub fn of(run: &Run) -> Self {
        FolderFacts {
            config: run.config().clone(),
            samples: run.samples().to_vec(),
            events: run.events().to_vec(),
            problems: run.problems(),
        }
    }

    /// Nothing could be read, for this reason.
    pub fn missing(why: String) -> Self {
        FolderFacts { problems: vec![why], ..FolderFacts::default() }
    }
}

impl News {
    /// How the run is, as far as is known.
    pub fn state(&self) -> Option<State> {
        self.look.as_ref().map(|look| look.state)
    }
}

/// Values here are replaced as a whole, so that a panic leaves none half-written.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
