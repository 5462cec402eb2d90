//! Which ranks this process runs, and where in the run each of them is, in a form that can be read at any
//! moment: also by the handler of a signal.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use kiln_collectives::Observer;

use super::launcher::{self, Word};

static RANKS: Mutex<Vec<Arc<Position>>> = Mutex::new(Vec::new());

/// Where a rank is.
struct Position {
    rank: usize,
    /// The optimizer step it is in; 0 before the first one.
    step: AtomicU64,
    /// The step whose end is in a complete checkpoint; 0 if there is none.
    saved: AtomicU64,
    peak_bytes: AtomicU64,
    observer: Observer,
    settled: Settled,
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
    pub observer: Observer,
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
            step: self.step.load(Ordering::Relaxed),
            saved: self.saved.load(Ordering::Relaxed),
            peak_bytes: self.peak_bytes.load(Ordering::Relaxed),
            settled,
            observer: self.observer.clone(),
        }
    }
}

/// A rank that can be found for as long as this lives.
pub struct Present(Arc<Position>);

impl Present {
    /// A rank of a run, of which `observer` sees what it does.
    pub fn new(observer: Observer) -> Present {
        let (step, saved, peak_bytes) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
        let (rank, settled) = (observer.rank(), Settled::default());
        let position = Arc::new(Position { rank, step, saved, peak_bytes, observer, settled });
        RANKS.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&position));
        Present(position)
    }

    /// Says which optimizer step begins.
    pub fn begin_step(&self, step: u64) {
        self.0.step.store(step, Ordering::Relaxed);
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
        self.0.saved.store(step, Ordering::Relaxed);
    }
}

impl Drop for Present {
    fn drop(&mut self) {
        let step = self.0.step.load(Ordering::Relaxed);
        if step > 0 {
            launcher::tell(Word::Step, &step.to_string());
        }
        let mut ranks = RANKS.lock().unwrap_or_else(PoisonError::into_inner);
        ranks.retain(|position| !Arc::ptr_eq(position, &self.0));
    }
}

/// The step that `rank` is in, or the only rank of this process if it is `None` or not one of them. Waits for
/// no lock and allocates nothing.
pub(super) fn step_of(rank: Option<usize>) -> Option<u64> {
    let ranks = RANKS.try_lock().ok()?;
    let own = ranks.iter().find(|position| Some(position.rank) == rank);
    let only = || ranks.first().filter(|_| ranks.len() == 1);
    let step = own.or_else(only)?.step.load(Ordering::Relaxed);
    (step > 0).then_some(step)
}

/// Writes where `rank` is, or where all ranks of this process are if it is `None` or not one of them.
/// Waits for no lock and allocates nothing.
pub(super) fn write_to(out: &mut dyn fmt::Write, rank: Option<usize>) -> fmt::Result {
    let Ok(ranks) = RANKS.try_lock() else { return Ok(()) };
    let own = ranks.iter().find(|position| Some(position.rank) == rank);
    // A process that is one rank counts its memory for another number in large worlds.
    let all = match own {
        Some(own) => std::slice::from_ref(own),
        None => &ranks[..],
    };
    for (index, position) in all.iter().enumerate() {
        out.write_str(if index == 0 { " on " } else { "; " })?;
        write!(out, "rank {}", position.rank)?;
        match position.step.load(Ordering::Relaxed) {
            0 => out.write_str(", before its first step")?,
            step => write!(out, ", step {step}")?,
        }
        position.observer.recorder().write_now(out)?;
    }
    Ok(())
}

/// Writes in which step this process ends, and what is saved. Waits for no lock and allocates nothing.
pub(super) fn write_unsaved_to(out: &mut dyn fmt::Write) -> fmt::Result {
    let Ok(ranks) = RANKS.try_lock() else { return Ok(()) };
    let latest = |of: fn(&Position) -> &AtomicU64| {
        ranks.iter().map(|position| of(position).load(Ordering::Relaxed)).max()
    };
    match latest(|position| &position.step) {
        None => return out.write_str(": nothing was saved"),
        Some(0) => out.write_str(" before the first step of this start")?,
        Some(step) => write!(out, " in step {step}")?,
    }
    match latest(|position| &position.saved) {
        None | Some(0) => out.write_str(": nothing of this run was saved"),
        Some(step) => write!(out, ": nothing was saved since step {step}"),
    }
}
