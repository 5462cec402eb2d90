//! The world from which groups of threads are split. An abort affects all groups of the world.

use super::delay::Delay;
use super::state;
use crate::backend::RankShared;
use crate::diagnosis::Witness;
use crate::error::Abort;
use crate::sync::{Monitor, lock};
use crate::verdict::Verdict;
use std::sync::{Arc, Mutex, Weak};

pub(super) const BACKEND: &str = "local";

pub(super) type GroupState = Monitor<state::State>;

#[derive(Default)]
pub(super) struct World {
    pub(super) ranks: Vec<Arc<RankShared>>,
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

    /// Returns the verdict on a timed-out wait for operation `sequence` of a group. Keeps the first verdict.
    pub(super) fn diagnose(&self, name: &str, world_ranks: &[usize], sequence: u64) -> Verdict {
        let witness = |rank: &Arc<RankShared>| Witness::Answered(Box::new(rank.flight(BACKEND, usize::MAX)));
        let witnesses: Vec<Witness> = self.ranks.iter().map(witness).collect();
        let verdict = Verdict::for_wait(&witnesses, name, world_ranks, sequence);
        lock(&self.state).verdict.get_or_insert(verdict).clone()
    }

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
