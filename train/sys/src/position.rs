//! Tracks the ranks of this process and their positions in the run, readable even by signal handlers.

use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kiln_collectives::RankView;

use super::facts::facts;
use super::launcher::{self, Message, Progress};

/// Name of the folder of crash reports in a run folder.
pub const CRASHES: &str = "crash";

static RANKS: Mutex<Vec<Arc<Position>>> = Mutex::new(Vec::new());

fn ranks() -> MutexGuard<'static, Vec<Arc<Position>>> {
    RANKS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the contents of the file with a rank's flight recorder.
pub type MakeFlight = Box<dyn Fn() -> Vec<u8> + Send + Sync>;

pub(super) struct Position {
    pub(super) rank: usize,
    shared: Option<&'static Progress>,
    own: Progress,
    peak_bytes: AtomicU64,
    pub(super) view: RankView,
    /// The last step whose outcome is known.
    settled: Mutex<Option<StepOutcome>>,
    pub(super) crashes: Vec<u8>,
    pub(super) crash: AtomicU64,
    pub(super) flight: MakeFlight,
}

impl Position {
    pub(super) fn progress(&self) -> &Progress {
        self.shared.unwrap_or(&self.own)
    }

    pub(super) fn step(&self) -> u64 {
        self.progress().step.load(Ordering::Relaxed)
    }

    /// The rank's activity other than communication, such as `"forward"`. Async-signal-safe.
    pub(super) fn phase(&self) -> &'static str {
        self.view.recorder().activity_now().unwrap_or("unknown")
    }

    /// Writes the current or last module of the rank. Async-signal-safe.
    pub(super) fn write_module(&self, out: &mut dyn fmt::Write) -> fmt::Result {
        (facts().write_module_of)(self.rank, out)
    }
}

/// The outcome of a step, as reported by a trainer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepOutcome {
    /// The step.
    pub step: u64,
    /// The loss of the step.
    pub loss: f64,
    /// Tokens of all ranks per second.
    pub tokens_per_s: f64,
    /// Duration of the step in seconds. Readers get the longest recent duration, which decays slowly.
    pub step_s: f64,
}

const REMEMBERED: f64 = 0.95;

/// The position of a rank, for readers.
#[derive(Clone, Debug)]
pub struct Whereabouts {
    /// The rank.
    pub rank: usize,
    /// The current optimizer step; 0 before the first.
    pub step: u64,
    /// The last step saved in a complete checkpoint; 0 if none.
    pub saved: u64,
    /// Peak bytes of the rank's compute memory; 0 before the first step.
    pub peak_bytes: u64,
    /// The last step with a known outcome, if any.
    pub settled: Option<StepOutcome>,
    /// A view of the rank's activities.
    pub view: RankView,
}

/// Returns the positions of the ranks of this process, in rank order.
pub fn all() -> Vec<Whereabouts> {
    let whereabouts = |position: &Arc<Position>| Whereabouts {
        rank: position.rank,
        step: position.step(),
        saved: position.progress().saved.load(Ordering::Relaxed),
        peak_bytes: position.peak_bytes.load(Ordering::Relaxed),
        settled: *position.settled.lock().unwrap_or_else(PoisonError::into_inner),
        view: position.view.clone(),
    };
    let mut all: Vec<_> = ranks().iter().map(whereabouts).collect();
    all.sort_by_key(|whereabouts| whereabouts.rank);
    all
}

/// The registration of a rank. Dropping it ends the registration.
pub struct RankPosition(Arc<Position>);

impl RankPosition {
    /// Registers a rank of the run in folder `out`; `view` shows the rank's activities.
    pub fn new(out: &Path, view: RankView, flight: MakeFlight) -> RankPosition {
        let crashes = out.join(CRASHES);
        launcher::send(Message::Crashes, &crashes.to_string_lossy());
        let crashes = crashes.as_os_str().as_bytes().to_vec();
        let position = Arc::new(Position {
            rank: view.rank(),
            shared: launcher::take_shared(),
            own: Progress::default(),
            peak_bytes: AtomicU64::new(0),
            view,
            settled: Mutex::default(),
            crashes,
            crash: AtomicU64::new(0),
            flight,
        });
        ranks().push(Arc::clone(&position));
        RankPosition(position)
    }

    /// Records the beginning of an optimizer step.
    pub fn begin_step(&self, step: u64) {
        self.0.progress().step.store(step, Ordering::Relaxed);
        self.0.view.recorder().begin_step(step);
    }

    /// Records the fetched micro-batch: its index in the step, its first sample in the global order, and its size.
    pub fn begin_micro_batch(&self, index: u64, first: u64, samples: u64) {
        for (place, value) in self.0.progress().micro_batch.iter().zip([index, first, samples]) {
            place.store(value, Ordering::Relaxed);
        }
    }

    /// Records the outcome of a step.
    pub fn settled(&self, outcome: StepOutcome) {
        let mut settled = self.0.settled.lock().unwrap_or_else(PoisonError::into_inner);
        let longest = settled.map_or(0.0, |before| REMEMBERED * before.step_s);
        *settled = Some(StepOutcome { step_s: outcome.step_s.max(longest), ..outcome });
    }

    /// Records the peak bytes of the rank's compute memory.
    pub fn has_held(&self, bytes: u64) {
        self.0.peak_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Records that `step` of the run was saved.
    pub fn saved(&self, step: u64) {
        self.0.progress().saved.store(step, Ordering::Relaxed);
    }
}

impl Drop for RankPosition {
    fn drop(&mut self) {
        let step = self.0.step();
        if step > 0 {
            launcher::send(Message::Step, &step.to_string());
        }
        ranks().retain(|position| !Arc::ptr_eq(position, &self.0));
    }
}

/// Returns the position of `rank`, or of the process's only rank if `rank` is `None` or unknown: in large worlds, such
/// a process counts memory under a different number. Async-signal-safe.
pub(super) fn of(rank: Option<usize>) -> Option<Arc<Position>> {
    let ranks = RANKS.try_lock().ok()?;
    let own = ranks.iter().find(|position| Some(position.rank) == rank);
    let only = || ranks.first().filter(|_| ranks.len() == 1);
    own.or_else(only).cloned()
}

/// Async-signal-safe.
pub(super) fn any() -> Option<Arc<Position>> {
    RANKS.try_lock().ok()?.first().cloned()
}

/// Writes the position of `rank`, or of all ranks of this process if it is `None` or unknown. Async-signal-safe.
pub(super) fn write_to(out: &mut dyn fmt::Write, rank: Option<usize>) -> fmt::Result {
    let Ok(ranks) = RANKS.try_lock() else { return Ok(()) };
    let own = ranks.iter().find(|position| Some(position.rank) == rank);
    let all = match own {
        Some(own) => std::slice::from_ref(own),
        None => &ranks[..],
    };
    for (index, position) in all.iter().enumerate() {
        out.write_str(if index == 0 { " on " } else { "; " })?;
        write!(out, "rank {}", position.rank)?;
        match position.step() {
            0 => out.write_str(", before its first step")?,
            step => write!(out, ", step {step}")?,
        }
        position.view.recorder().write_now(out)?;
    }
    Ok(())
}

/// Writes the current step and the last saved one. Async-signal-safe.
pub(super) fn write_unsaved_to(out: &mut dyn fmt::Write) -> fmt::Result {
    let Ok(ranks) = RANKS.try_lock() else { return Ok(()) };
    let latest = |of: fn(&Position) -> &AtomicU64| {
        ranks.iter().map(|position| of(position).load(Ordering::Relaxed)).max()
    };
    match latest(|position| &position.progress().step) {
        None => return out.write_str(": nothing was saved"),
        Some(0) => out.write_str(" before the first step of this start")?,
        Some(step) => write!(out, " in step {step}")?,
    }
    match latest(|position| &position.progress().saved) {
        None | Some(0) => out.write_str(": nothing of this run was saved"),
        Some(step) => write!(out, ": nothing was saved since step {step}"),
    }
}
