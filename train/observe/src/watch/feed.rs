//! Threads that look at runs, so that one that hangs holds up neither keys nor the other runs.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use kiln_process::ProcessId;

use super::cpu::CpuMeter;
use super::gpu::{GpuMeter, opened_by, used_by};
use super::logs::Logs;
use super::subject::{FolderFacts, Gauges, Subject};
use crate::run::{Run, find_runs};
use crate::status::{Look, LookAt};

/// How often a run is looked at.
const EVERY: Duration = Duration::from_secs(1);

/// How often runs are looked for in the folders that were named.
const FIND_EVERY: Duration = Duration::from_secs(3);

/// Threads that look at runs: each looks at its share of them.
const THREADS: usize = 8;

/// A run that is over is looked at once in so many rounds: it may go on again.
const OVER: u64 = 5;

/// Runs as they are known now, kept up to date by threads of their own.
pub(super) struct Feed {
    shared: Arc<Shared>,
    threads: Vec<Thread>,
}

struct Shared {
    look_at: LookAt,
    subjects: Mutex<Vec<Arc<Subject>>>,
    notes: Mutex<Vec<String>>,
    /// Counts what has been told.
    told: AtomicU64,
    is_over: AtomicBool,
    has_panicked: AtomicBool,
}

impl Feed {
    /// Begins to look at the runs that `paths` name: run folders, or folders of run folders.
    ///
    /// # Errors
    ///
    /// If there are no more threads to be had.
    pub(super) fn start(paths: Vec<PathBuf>, look_at: LookAt) -> io::Result<Feed> {
        let shared = Arc::new(Shared {
            look_at,
            subjects: Mutex::default(),
            notes: Mutex::default(),
            told: AtomicU64::new(0),
            is_over: AtomicBool::new(false),
            has_panicked: AtomicBool::new(false),
        });
        let mut feed = Feed { shared: Arc::clone(&shared), threads: Vec::new() };
        feed.spawn("kiln-watch-find".to_owned(), move |shared| find(&shared, &paths))?;
        for worker in 0..THREADS {
            feed.spawn(format!("kiln-watch-{worker}"), move |shared| look(&shared, worker))?;
        }
        Ok(feed)
    }

    fn spawn(&mut self, name: String, run: impl FnOnce(Arc<Shared>) + Send + 'static) -> io::Result<()> {
        let shared = Arc::clone(&self.shared);
        let body = move || {
            let _watched = TellsPanic(Arc::clone(&shared));
            run(shared);
        };
        self.threads.push(thread::Builder::new().name(name).spawn(body)?.thread().clone());
        Ok(())
    }

    /// The runs, in the order in which they were found.
    pub(super) fn subjects(&self) -> Vec<Arc<Subject>> {
        lock(&self.shared.subjects).clone()
    }

    /// What is wrong with the paths that were named.
    pub(super) fn notes(&self) -> Vec<String> {
        lock(&self.shared.notes).clone()
    }

    /// A number that grows with everything that is told.
    pub(super) fn told(&self) -> u64 {
        self.shared.told.load(Ordering::Acquire)
    }

    /// Whether a thread has panicked.
    pub(super) fn has_panicked(&self) -> bool {
        self.shared.has_panicked.load(Ordering::Acquire)
    }
}

impl Drop for Feed {
    /// Nobody waits for the threads: one may be in a look that takes its time.
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Release);
        self.threads.iter().for_each(Thread::unpark);
    }
}

struct TellsPanic(Arc<Shared>);

impl Drop for TellsPanic {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.has_panicked.store(true, Ordering::Release);
        }
    }
}

impl Shared {
    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    fn tell(&self) {
        self.told.fetch_add(1, Ordering::Release);
    }

    /// Waits until the round that began at `begin` has lasted for `length`, or everything is over.
    fn rest(&self, begin: Instant, length: Duration) {
        while let Some(left) =
            length.checked_sub(begin.elapsed()).filter(|left| !left.is_zero() && !self.is_over())
        {
            thread::park_timeout(left);
        }
    }
}

/// Looks for runs, again and again: those that begin later are shown as well.
fn find(shared: &Shared, paths: &[PathBuf]) {
    while !shared.is_over() {
        let begin = Instant::now();
        let mut notes = Vec::new();
        for path in paths {
            match find_runs(std::slice::from_ref(path)) {
                Ok(runs) => {
                    let mut subjects = lock(&shared.subjects);
                    for run in runs {
                        if !subjects.iter().any(|known| known.folder() == run) {
                            subjects.push(Arc::new(Subject::new(run)));
                            shared.tell();
                        }
                    }
                }
                Err(error) => notes.push(error.to_string()),
            }
        }
        let mut told = lock(&shared.notes);
        if *told != notes {
            *told = notes;
            shared.tell();
        }
        drop(told);
        shared.rest(begin, FIND_EVERY);
    }
}

/// Looks at every eighth run, from the one with the number `worker` on.
fn look(shared: &Shared, worker: usize) {
    let mut lookers: HashMap<usize, Looker> = HashMap::new();
    let gpus = Arc::new(GpuMeter::new());
    let mut round = 0;
    while !shared.is_over() {
        let begin = Instant::now();
        let subjects = lock(&shared.subjects).clone();
        for (index, subject) in subjects.iter().enumerate().skip(worker).step_by(THREADS) {
            let looker = lookers.entry(index).or_insert_with(|| Looker::new(subject, Arc::clone(&gpus)));
            looker.read(subject);
            shared.tell();
            if round % OVER == 0 || !looker.is_over {
                looker.look(subject, &shared.look_at);
                shared.tell();
            }
            if shared.is_over() {
                return;
            }
        }
        // What has been found meanwhile should not wait for a second.
        let is_idle = lookers.is_empty();
        shared.rest(begin, if is_idle { EVERY / 10 } else { EVERY });
        round += u64::from(!is_idle);
    }
}

/// What looks at one run.
struct Looker {
    logs: Logs,
    cpu: CpuMeter,
    gpus: Arc<GpuMeter>,
    is_over: bool,
}

impl Looker {
    fn new(subject: &Subject, gpus: Arc<GpuMeter>) -> Self {
        Looker { logs: Logs::new(subject.folder()), cpu: CpuMeter::default(), gpus, is_over: false }
    }

    /// Reads what is new in the folder.
    fn read(&mut self, subject: &Subject) {
        let is_known = subject.files().is_some();
        let is_new = if is_known {
            subject.files().as_mut().is_some_and(Run::refresh)
        } else {
            // A large one takes seconds, in which nobody is kept from what is known.
            match Run::open(subject.folder()) {
                Ok(run) => subject.files().insert(run).folder().exists(),
                Err(error) => {
                    subject.tell(|news| news.folder = Arc::new(FolderFacts::missing(error.to_string())));
                    false
                }
            }
        };
        if is_new && let Some(facts) = subject.files().as_ref().map(FolderFacts::of) {
            subject.tell(|news| {
                news.version += 1;
                news.folder = Arc::new(facts);
            });
        }
        if let Some(log) = self.logs.refresh() {
            subject.tell(|news| news.log = log);
        }
    }

    /// Asks the run.
    fn look(&mut self, subject: &Subject, look_at: &LookAt) {
        let look = look_at(subject.folder());
        self.is_over = look.as_ref().is_ok_and(|look| look.state.is_over());
        let gauges = look.as_ref().map(|look| self.gauges(look)).unwrap_or_default();
        subject.tell(|news| {
            match look {
                Ok(look) => {
                    news.look = Some(Arc::new(look));
                    news.looked = Some(Instant::now());
                    news.look_error = None;
                }
                Err(why) => news.look_error = Some(why),
            }
            news.gauges = Arc::new(gauges);
        });
    }

    fn gauges(&mut self, look: &Look) -> BTreeMap<usize, Gauges> {
        let here = ProcessId::this().host;
        let now = Instant::now();
        let mut gauges = BTreeMap::new();
        let gpus = if look.processes.is_empty() { Vec::new() } else { self.gpus.gpus() };
        for process in look.processes.iter().filter(|process| process.host == here) {
            let cpu = self.cpu.share(process.process, now);
            let opened = if gpus.is_empty() { Vec::new() } else { opened_by(process.process) };
            let gpu = used_by(&gpus, process.process, &opened);
            let (load, celsius) = (gpu.and_then(|gpu| gpu.load), gpu.and_then(|gpu| gpu.celsius));
            let of_rank = Gauges { cpu, gpu: load, celsius };
            gauges.extend(process.ranks.iter().map(|rank| (*rank, of_rank)));
        }
        gauges
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
