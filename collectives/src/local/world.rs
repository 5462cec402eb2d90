//! The world from which groups of threads are split. An abort affects all groups of the world.

use super::delay::Delay;
use super::state;
use crate::backend::RankShared;
use crate::diagnosis::Witness;
use crate::error::Abort;
use crate::sync::{Monitor, lock};
use crate::verdict::Verdict;
use std::sync::{Arc, Mutex, Weak};

/// Name of the backend.
pub(super) const BACKEND: &str = "local";

/// The state of a group, on which its ranks wait.
pub(super) type GroupState = Monitor<state::State>;

/// The state that all groups of one world share.
#[derive(Default)]
pub(super) struct World {
    /// All ranks of the world. Diagnosis compares their recorders.
    pub(super) ranks: Vec<Arc<RankShared>>,
    /// Random delays of every operation; `None` for no delays.
    pub(super) delay: Option<Delay>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    groups: Vec<Weak<GroupState>>,
    abort: Option<Abort>,
    verdict: Option<Verdict>,
}

impl World {
    pub(super) fn new(ranks: Vec<Arc<RankShared>>, delay: Option<Delay>) -> World {
        World { ranks, delay, state: Mutex::default() }
    }

    /// Compares the recorders of all ranks after a wait for operation `sequence` of the group `name` of
    /// `world_ranks` has timed out. The first verdict is kept.
    pub(super) fn diagnose(&self, name: &str, world_ranks: &[usize], sequence: u64) -> Verdict {
        let witness = |rank: &Arc<RankShared>| Witness::Answered(Box::new(rank.flight(BACKEND, usize::MAX)));
        let witnesses: Vec<Witness> = self.ranks.iter().map(witness).collect();
        let verdict = Verdict::for_wait(&witnesses, name, world_ranks, sequence);
        lock(&self.state).verdict.get_or_insert(verdict).clone()
    }

    /// Returns the verdict of the first time-out.
    pub(super) fn verdict(&self) -> Option<Verdict> {
        lock(&self.state).verdict.clone()
    }

    /// Adds a group. It starts failed if the world has been aborted.
    pub(super) fn add(&self, group: &Arc<GroupState>) {
        let mut state = lock(&self.state);
        state.groups.retain(|known| known.strong_count() > 0);
        state.groups.push(Arc::downgrade(group));
        let abort = state.abort.clone();
        // The lock order is group before world, because splits take them in that order.
        drop(state);
        if let Some(abort) = abort {
            group.update(|state| state.fail(abort));
        }
    }

    /// Returns the abort of the world, or `None` if it was not aborted.
    pub(super) fn aborted(&self) -> Option<Abort> {
        lock(&self.state).abort.clone()
    }

    /// Fails all existing and future groups. The first abort wins.
    pub(super) fn abort(&self, abort: Abort) {
        let mut state = lock(&self.state);
        let abort = state.abort.get_or_insert(abort).clone();
        let groups: Vec<Arc<GroupState>> = state.groups.iter().filter_map(Weak::upgrade).collect();
        drop(state);
        for group in groups {
            group.update(|state| state.fail(abort.clone()));
        }
    }
}
