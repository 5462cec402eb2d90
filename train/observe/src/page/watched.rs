//! The state of the shown runs, refreshed on request.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};

use kiln_collectives::StepTimeline;

use crate::run::{Run, find_runs};
use crate::status::{Look, LookAt};

/// Interval between requests to runs that have ended.
const SELDOM: Duration = Duration::from_secs(10);

/// Time after the last request for timelines at which they are no longer read.
const FORGOTTEN: Duration = Duration::from_secs(5);

/// Reads the last complete step of every reachable rank of the run in a folder, or returns an error message.
pub type TimelinesAt = Arc<dyn Fn(&Path) -> Result<Vec<StepTimeline>, String> + Send + Sync>;

pub(super) struct Watched {
    paths: Vec<PathBuf>,
    look_at: LookAt,
    timelines_at: Option<TimelinesAt>,
    runs: RwLock<Vec<Arc<WatchedRun>>>,
    problems: RwLock<Vec<String>>,
}

pub(super) struct WatchedRun {
    /// Name for clients: the folder's name, with a number if it is not unique.
    pub(super) id: String,
    folder: PathBuf,
    run: RwLock<Run>,
    seen: Mutex<Seen>,
}

#[derive(Default)]
pub(super) struct Seen {
    pub(super) look: Option<Arc<Look>>,
    pub(super) problem: Option<String>,
    pub(super) timelines: Option<Arc<Result<Vec<StepTimeline>, String>>>,
    looked: Option<Instant>,
    timelines_wanted: Option<Instant>,
}

impl Watched {
    pub(super) fn new(paths: Vec<PathBuf>, look_at: LookAt, timelines_at: Option<TimelinesAt>) -> Watched {
        let (runs, problems) = Default::default();
        Watched { paths, look_at, timelines_at, runs, problems }
    }

    pub(super) fn runs(&self) -> Vec<Arc<WatchedRun>> {
        self.runs.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn run(&self, id: &str) -> Option<Arc<WatchedRun>> {
        self.runs().into_iter().find(|run| run.id == id)
    }

    pub(super) fn problems(&self) -> Vec<String> {
        self.problems.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn read_folders(&self) {
        self.find();
        for run in self.runs() {
            run.run.write().unwrap_or_else(PoisonError::into_inner).refresh();
        }
    }

    pub(super) fn ask_processes(&self) {
        for run in self.runs() {
            run.ask(&self.look_at, self.timelines_at.as_ref());
        }
    }

    fn find(&self) {
        let (mut folders, mut problems) = (Vec::new(), Vec::new());
        for path in &self.paths {
            match find_runs(std::slice::from_ref(path)) {
                Ok(found) => {
                    folders.extend(found.into_iter().filter(|one| !folders.contains(one)).collect::<Vec<_>>())
                }
                Err(error) => problems.push(error.to_string()),
            }
        }
        let known = self.runs();
        let mut ids = BTreeSet::new();
        let mut runs: Vec<Arc<WatchedRun>> = Vec::new();
        for folder in folders {
            let opened = match known.iter().find(|run| run.folder == folder) {
                Some(run) => Ok(run.clone()),
                None => WatchedRun::open(&folder, &known, &ids),
            };
            match opened {
                Ok(run) => {
                    ids.insert(run.id.clone());
                    runs.push(run);
                }
                Err(problem) => problems.push(problem),
            }
        }
        *self.runs.write().unwrap_or_else(PoisonError::into_inner) = runs;
        *self.problems.write().unwrap_or_else(PoisonError::into_inner) = problems;
    }
}

impl WatchedRun {
    fn open(
        folder: &Path,
        known: &[Arc<WatchedRun>],
        taken: &BTreeSet<String>,
    ) -> Result<Arc<WatchedRun>, String> {
        let run = Run::open(folder).map_err(|error| error.to_string())?;
        let is_free = |id: &String| !taken.contains(id) && known.iter().all(|run| run.id != *id);
        let numbered = (2u64..).map(|number| format!("{} ({number})", run.name()));
        let mut names = std::iter::once(run.name().to_owned()).chain(numbered);
        let id = names.find(is_free).unwrap_or_default();
        Ok(Arc::new(WatchedRun {
            id,
            folder: folder.to_owned(),
            run: RwLock::new(run),
            seen: Mutex::default(),
        }))
    }

    pub(super) fn read(&self) -> RwLockReadGuard<'_, Run> {
        self.run.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Requests timelines with the next question to the processes. Returns true if there already is an answer.
    pub(super) fn want_timelines(&self) -> bool {
        let mut seen = self.seen();
        seen.timelines_wanted = Some(Instant::now());
        seen.timelines.is_some()
    }

    fn ask(&self, look_at: &LookAt, timelines_at: Option<&TimelinesAt>) {
        let (is_due, wants_timelines) = {
            let seen = self.seen();
            let is_over = seen.look.as_ref().is_some_and(|look| look.state.is_over());
            let is_due = !is_over || seen.looked.is_none_or(|looked| looked.elapsed() >= SELDOM);
            (is_due, seen.timelines_wanted.is_some_and(|wanted| wanted.elapsed() < FORGOTTEN))
        };
        if is_due {
            let look = look_at(&self.folder);
            let mut seen = self.seen();
            seen.looked = Some(Instant::now());
            match look {
                Ok(look) => (seen.look, seen.problem) = (Some(Arc::new(look)), None),
                Err(problem) => (seen.look, seen.problem) = (None, Some(problem)),
            }
        }
        if let (true, Some(timelines_at)) = (wants_timelines, timelines_at) {
            let timelines = timelines_at(&self.folder);
            self.seen().timelines = Some(Arc::new(timelines));
        }
    }
}
