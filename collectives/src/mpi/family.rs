//! What the groups of one world share on one rank.

use super::message::{Cause, Number};
use crate::member::RankShared;
use crate::sync::lock;
use crate::verdict::Verdict;
use std::sync::{Arc, Mutex, Weak};

/// The groups that descend from one world.
pub(super) struct Family {
    /// Number of the world.
    pub(super) world: Number,
    shared: Weak<RankShared>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    abort: Option<Cause>,
    verdict: Option<Verdict>,
}

impl Family {
    pub(super) fn new(world: Number, shared: &Arc<RankShared>) -> Family {
        Family { world, shared: Arc::downgrade(shared), state: Mutex::default() }
    }

    /// This rank's records; `None` once it has left all groups.
    pub(super) fn shared(&self) -> Option<Arc<RankShared>> {
        self.shared.upgrade()
    }

    /// Remembers what a failure says about the whole world. The first abort and verdict stay.
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
