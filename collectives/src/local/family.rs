//! The groups that descend from one world. An abort reaches all of them.

use super::LocalEnd;
use super::group::Group;
use crate::error::Abort;
use crate::member::{End, RankShared};
use crate::sync::lock;
use crate::verdict::{Verdict, Witness};
use std::sync::{Arc, Mutex, Weak};

#[derive(Default)]
pub(super) struct Family {
    /// All ranks of the world: their recorders tell who holds up whom.
    ranks: Vec<Arc<RankShared>>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    groups: Vec<Weak<Group>>,
    abort: Option<Abort>,
    verdict: Option<Verdict>,
}

impl Family {
    pub(super) fn new(ranks: Vec<Arc<RankShared>>) -> Family {
        Family { ranks, state: Mutex::default() }
    }

    /// Compares the recorders of all ranks after a wait in vain for operation `sequence` of `group`. The
    /// first verdict stays.
    pub(super) fn diagnose(&self, group: &Group, sequence: u64) -> Verdict {
        let flight = |rank: &Arc<RankShared>| rank.flight(LocalEnd::BACKEND, String::new());
        let witness = |rank| Witness::Answered(Box::new(flight(rank)));
        let witnesses: Vec<Witness> = self.ranks.iter().map(witness).collect();
        let verdict = Verdict::of_wait(&witnesses, &group.name, &group.world_ranks, sequence);
        lock(&self.state).verdict.get_or_insert(verdict).clone()
    }

    /// The verdict of the first time-out.
    pub(super) fn verdict(&self) -> Option<Verdict> {
        lock(&self.state).verdict.clone()
    }

    /// Adds a group. It starts failed if the family has been aborted.
    pub(super) fn join(&self, group: &Arc<Group>) {
        let mut state = lock(&self.state);
        state.groups.retain(|known| known.strong_count() > 0);
        state.groups.push(Arc::downgrade(group));
        let abort = state.abort.clone();
        // Groups are never locked while the family is: splits lock in the other order.
        drop(state);
        if let Some(abort) = abort {
            group.fail(abort);
        }
    }

    /// Why the family was aborted, if it was.
    pub(super) fn aborted(&self) -> Option<Abort> {
        lock(&self.state).abort.clone()
    }

    /// Fails all groups, and those still to be made. The first abort wins.
    pub(super) fn abort(&self, abort: Abort) {
        let mut state = lock(&self.state);
        let abort = state.abort.get_or_insert(abort).clone();
        let groups: Vec<Arc<Group>> = state.groups.iter().filter_map(Weak::upgrade).collect();
        drop(state);
        for group in groups {
            group.fail(abort.clone());
        }
    }
}
