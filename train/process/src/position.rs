//! Which ranks this process runs, and where in the run each of them is, in a form that can be read at any
//! moment: also by the handler of a signal.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use kiln_collectives::Recorder;

use super::launcher::{self, Word};

static RANKS: Mutex<Vec<Arc<Position>>> = Mutex::new(Vec::new());

/// Where a rank is.
struct Position {
    rank: usize,
    /// The optimizer step it is in; 0 before the first one.
    step: AtomicU64,
    /// The step whose end is in a complete checkpoint; 0 if there is none.
    saved: AtomicU64,
    recorder: Arc<Recorder>,
}

/// A rank that can be found for as long as this lives.
pub struct Present(Arc<Position>);

impl Present {
    /// Rank `rank` of a run, whose recorder knows what it does.
    pub fn new(rank: usize, recorder: Arc<Recorder>) -> Present {
        let (step, saved) = (AtomicU64::new(0), AtomicU64::new(0));
        let position = Arc::new(Position { rank, step, saved, recorder });
        RANKS.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&position));
        Present(position)
    }

    /// Says which optimizer step begins.
    pub fn begin_step(&self, step: u64) {
        self.0.step.store(step, Ordering::Relaxed);
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
        position.recorder.write_now(out)?;
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
