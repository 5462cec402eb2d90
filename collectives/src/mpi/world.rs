//! The state that the groups of one world share on one rank.

use super::message::{Failure, Number};
use crate::backend::RankShared;
use crate::error::{Cause, CommError};
use crate::flight::Flight;
use crate::sync::lock;
use crate::verdict::Verdict;
use std::sync::{Arc, Mutex, Weak};

pub(super) const BACKEND: &str = "mpi";

pub(super) struct World {
    pub(super) number: Number,
    shared: Weak<RankShared>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    abort: Option<Failure>,
    verdict: Option<Verdict>,
}

impl World {
    pub(super) fn new(number: Number, shared: &Arc<RankShared>) -> World {
        World { number, shared: Arc::downgrade(shared), state: Mutex::default() }
    }

    /// `None` once the rank has left all groups.
    pub(super) fn flight(&self) -> Option<Box<Flight>> {
        Some(self.shared.upgrade()?.short_flight(BACKEND))
    }

    /// Records an abort of the world, or the verdict of a timeout. The first of each is kept.
    pub(super) fn learn(&self, failure: &Failure) {
        let mut state = lock(&self.state);
        if failure.everywhere {
            state.abort.get_or_insert_with(|| failure.clone());
        }
        if let Cause::Error(CommError::TimedOut { verdict, .. }) = &failure.cause {
            state.verdict.get_or_insert_with(|| (**verdict).clone());
        }
    }

    pub(super) fn aborted(&self) -> Option<Failure> {
        lock(&self.state).abort.clone()
    }

    pub(super) fn verdict(&self) -> Option<Verdict> {
        lock(&self.state).verdict.clone()
    }
}
