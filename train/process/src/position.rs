//! Which ranks this process runs, and where in the run each of them is, in a form that can be read at any
//! moment: also by the handler of a signal.

use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use kiln_collectives::RankView;

use super::facts;
use super::launcher::{self, Word};
use super::page::{self, Progress};

/// Folder of crashes inside a run folder.
pub const CRASHES: &str = "crash";

static RANKS: Mutex<Vec<Arc<Position>>> = Mutex::new(Vec::new());

/// Makes the flight recorder of a rank, as it is to be in a file.
pub type MakeFlight = Box<dyn Fn() -> Vec<u8> + Send + Sync>;

/// Where a rank is.
pub(super) struct Position {
    pub(super) rank: usize,
    /// In memory that it shares with its launcher, where there is some.
    shared: Option<&'static Progress>,
    own: Progress,
    peak_bytes: AtomicU64,
    view: RankView,
    settled: Settled,
    /// The folder of crashes of its run.
    pub(super) crashes: Vec<u8>,
    /// The number of its own folder there; 0 if it has none yet.
    pub(super) crash: AtomicU64,
    pub(super) flight: MakeFlight,
}

/// What is known of the last step whose outcome is known. Each value by itself: they may be of two steps.
#[derive(Default)]
struct Settled {
    /// The step; 0 before the first.
    step: AtomicU64,
    /// Bits of numbers.
    loss: AtomicU64,
    tokens_per_s: AtomicU64,
    longest_s: AtomicU64,
}

/// What a trainer says of a step whose outcome is known.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepOutcome {
    /// The step.
    pub step: u64,
    /// Its loss.
    pub loss: f64,
    /// Tokens of all ranks over its time.
    pub tokens_per_s: f64,
    /// Its time, in seconds. As somebody else is told it, the longest of late: long steps are forgotten by and by.
    pub step_s: f64,
}

/// How fast long steps are forgotten: the share that stays of the longest one after each step.
const REMEMBERED: f64 = 0.95;

/// Where a rank is, for whoever asks.
#[derive(Clone, Debug)]
pub struct Whereabouts {
    /// The rank.
    pub rank: usize,
    /// The optimizer step it is in; 0 before the first one.
    pub step: u64,
    /// The step whose end is in a complete checkpoint; 0 if there is none.
    pub saved: u64,
    /// The most bytes that it has held, of the memory that it computes with; 0 before the first step.
    pub peak_bytes: u64,
    /// The last step whose outcome is known, if there is one.
    pub settled: Option<StepOutcome>,
    /// Sees what it does.
    pub view: RankView,
}

/// Where the ranks of this process are, in rank order.
pub fn all() -> Vec<Whereabouts> {
    let ranks = RANKS.lock().unwrap_or_else(PoisonError::into_inner);
    let mut all: Vec<_> = ranks.iter().map(|position| position.whereabouts()).collect();
    all.sort_by_key(|whereabouts| whereabouts.rank);
    all
}

impl Position {
    fn whereabouts(&self) -> Whereabouts {
        let Settled { step, loss, tokens_per_s, longest_s } = &self.settled;
        let number = |value: &AtomicU64| f64::from_bits(value.load(Ordering::Relaxed));
        let step = step.load(Ordering::Acquire);
        let settled = (step > 0).then(|| StepOutcome {
            step,
            loss: number(loss),
            tokens_per_s: number(tokens_per_s),
            step_s: number(longest_s),
        });
        Whereabouts {
            rank: self.rank,
            step: self.step(),
            saved: self.progress().saved.load(Ordering::Relaxed),
            peak_bytes: self.peak_bytes.load(Ordering::Relaxed),
            settled,
            view: self.view.clone(),
        }
    }
}

/// A rank that can be found for as long as this lives.
pub struct Present(Arc<Position>);

impl Present {
    /// A rank of the run in `out`, of which `view` sees what it does.
    pub fn new(out: &Path, view: RankView, flight: MakeFlight) -> Present {
        let crashes = out.join(CRASHES);
        launcher::tell(Word::Crashes, &crashes.to_string_lossy());
        let crashes = crashes.as_os_str().as_bytes().to_vec();
        let position = Arc::new(Position {
            rank: view.rank(),
            shared: page::take(),
            own: Progress::default(),
            peak_bytes: AtomicU64::new(0),
            view,
            settled: Settled::default(),
            crashes,
            crash: AtomicU64::new(0),
            flight,
        });
        RANKS.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&position));
        Present(position)
    }

    /// Says which optimizer step begins.
    pub fn begin_step(&self, step: u64) {
        self.0.progress().step.store(step, Ordering::Relaxed);
        self.0.view.recorder().begin_step(step);
    }

    /// Says which micro-batch of the step is fetched: so many samples from `first` on in the global order.
    pub fn begin_micro_batch(&self, index: u64, first: u64, samples: u64) {
        for (place, value) in self.0.progress().micro_batch.iter().zip([index, first, samples]) {
            place.store(value, Ordering::Relaxed);
        }
    }

    /// Says what became of a step.
    pub fn settled(&self, outcome: StepOutcome) {
        let Settled { step, loss, tokens_per_s, longest_s } = &self.0.settled;
        let longest = REMEMBERED * f64::from_bits(longest_s.load(Ordering::Relaxed));
        loss.store(outcome.loss.to_bits(), Ordering::Relaxed);
        tokens_per_s.store(outcome.tokens_per_s.to_bits(), Ordering::Relaxed);
        longest_s.store(outcome.step_s.max(longest).to_bits(), Ordering::Relaxed);
        step.store(outcome.step, Ordering::Release);
    }

    /// Says how many bytes the rank has held at most, of the memory that it computes with.
    pub fn has_held(&self, bytes: u64) {
        self.0.peak_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Says up to which step the run is saved.
    pub fn saved(&self, step: u64) {
        self.0.progress().saved.store(step, Ordering::Relaxed);
    }
}

impl Drop for Present {
    fn drop(&mut self) {
        let step = self.0.step();
        if step > 0 {
            launcher::tell(Word::Step, &step.to_string());
        }
        let mut ranks = RANKS.lock().unwrap_or_else(PoisonError::into_inner);
        ranks.retain(|position| !Arc::ptr_eq(position, &self.0));
    }
}

impl Position {
    fn progress(&self) -> &Progress {
        self.shared.unwrap_or(&self.own)
    }

    /// The optimizer step it is in; 0 before the first one.
    pub(super) fn step(&self) -> u64 {
        self.progress().step.load(Ordering::Relaxed)
    }

    /// What it does besides communicating, such as `"forward"`. Waits for no lock and allocates nothing.
    pub(super) fn phase(&self) -> &'static str {
        self.view.recorder().activity_now().unwrap_or("unknown")
    }

    /// Writes the module that it is in, or has been in last. Waits for no lock and allocates nothing.
    pub(super) fn write_unit(&self, out: &mut dyn fmt::Write) -> fmt::Result {
        facts::write_module_of(self.rank, out)
    }

    /// Writes what it does and what it has called last. Waits for no lock and allocates nothing.
    pub(super) fn write_doing(&self, out: &mut dyn fmt::Write) -> fmt::Result {
        self.view.recorder().write_now(out)
    }

    /// Writes the collective that it has called last. Waits for no lock and allocates nothing.
    pub(super) fn write_call(&self, out: &mut dyn fmt::Write) -> fmt::Result {
        self.view.recorder().write_last_call(out)
    }

    /// The micro-batch that was fetched last: its number in the step, its first sample in the global order, and
    /// the number of its samples.
    pub(super) fn micro_batch(&self) -> Option<(u64, u64, u64)> {
        let [index, first, samples] =
            [0, 1, 2].map(|i| self.progress().micro_batch[i].load(Ordering::Relaxed));
        (samples > 0).then_some((index, first, samples))
    }
}

/// Where `rank` is, or the only rank of this process if it is `None` or not one of them: a process that is one
/// rank counts its memory for another number in large worlds. Waits for no lock and allocates nothing.
pub(super) fn of(rank: Option<usize>) -> Option<Arc<Position>> {
    let ranks = RANKS.try_lock().ok()?;
    let own = ranks.iter().find(|position| Some(position.rank) == rank);
    let only = || ranks.first().filter(|_| ranks.len() == 1);
    own.or_else(only).cloned()
}

/// Any rank of this process. Waits for no lock and allocates nothing.
pub(super) fn any() -> Option<Arc<Position>> {
    RANKS.try_lock().ok()?.first().cloned()
}

/// Writes where `rank` is, or where all ranks of this process are if it is `None` or not one of them.
/// Waits for no lock and allocates nothing.
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
        position.write_doing(out)?;
    }
    Ok(())
}

/// Writes in which step this process ends, and what is saved. Waits for no lock and allocates nothing.
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
