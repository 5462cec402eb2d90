//! What the groups of one world share on one rank.

use super::message::{Cause, Number};
use crate::backend::RankShared;
use crate::flight::Flight;
use crate::sync::lock;
use crate::verdict::Verdict;
use std::sync::{Arc, Mutex, Weak};

/// Name of the backend.
pub(super) const BACKEND: &str = "mpi";

/// Number of records in a flight that is sent to another rank.
const RECORDS: usize = 64;

/// A world, seen from one of its ranks.
pub(super) struct World {
    pub(super) number: Number,
    shared: Weak<RankShared>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    abort: Option<Cause>,
    verdict: Option<Verdict>,
}

impl World {
    pub(super) fn new(number: Number, shared: &Arc<RankShared>) -> World {
        World { number, shared: Arc::downgrade(shared), state: Mutex::default() }
    }

    /// This rank's flight recorder with its last records; `None` once the rank has left all groups. `node` is
    /// its machine.
    pub(super) fn flight(&self, node: &str) -> Option<Box<Flight>> {
        let mut flight = self.shared.upgrade()?.flight(BACKEND, node.to_owned());
        let surplus = flight.records.len().saturating_sub(RECORDS);
        flight.records.drain(..surplus);
        Some(Box::new(flight))
    }

    /// Notes an abort of the world or a verdict that `cause` carries. The first abort and verdict stay.
    pub(super) fn learn(&self, cause: &Cause) {
        let mut state = lock(&self.state);
        match cause {
            Cause::Abort { everywhere: true, .. } => {
                state.abort.get_or_insert_with(|| cause.clone());
            }
            Cause::TimedOut { verdict, .. } => {
                state.verdict.get_or_insert_with(|| verdict.clone());
            }
            Cause::Abort { .. } | Cause::Mismatch { .. } => {}
        }
    }

    /// Why the world was aborted, if it was.
    pub(super) fn aborted(&self) -> Option<Cause> {
        lock(&self.state).abort.clone()
    }

    /// The verdict of the first time-out.
    pub(super) fn verdict(&self) -> Option<Verdict> {
        lock(&self.state).verdict.clone()
    }
}
