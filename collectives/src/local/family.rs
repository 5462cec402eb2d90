//! The groups that descend from one world. An abort reaches all of them.

use super::group::Group;
use crate::error::Abort;
use crate::sync::lock;
use std::sync::{Arc, Mutex, Weak};

#[derive(Default)]
pub(super) struct Family {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    groups: Vec<Weak<Group>>,
    abort: Option<Abort>,
}

impl Family {
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
