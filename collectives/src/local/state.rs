//! The state that the ranks of a group lock and wait on.

use crate::buffer::Buffer;
use crate::call::Call;
use crate::error::{Abort, Cause};
use std::collections::BTreeMap;
use std::sync::Arc;

pub(super) struct State {
    /// Operations that at least one rank has entered and not all have left; at most two.
    pub(super) operations: BTreeMap<u64, Operation>,
    pub(super) issued: Vec<u64>,
    pub(super) failure: Option<Cause>,
    /// A rank whose worker stopped in the middle of an operation.
    pub(super) crashed: Option<usize>,
}

impl State {
    pub(super) fn new(world_size: usize) -> State {
        State { operations: BTreeMap::new(), issued: vec![0; world_size], failure: None, crashed: None }
    }

    /// Fails operations that not all ranks have entered. The first cause wins.
    pub(super) fn fail(&mut self, abort: Abort) {
        self.failure.get_or_insert(Cause::Abort(abort));
    }
}

pub(super) type Deposits = Vec<Option<Arc<Buffer>>>;

/// A running operation of a group. In each of its rounds, every rank may deposit a buffer for the others to read, and
/// waits until all have arrived. Arrival at a round ends the reads of the previous round, so owners may take deposits
/// back.
pub(super) struct Operation {
    /// The call of each rank; `None` until the rank has entered.
    pub(super) calls: Vec<Option<Call>>,
    pub(super) deposits: [Deposits; 2],
    /// True once all ranks have entered and agree. Never reset: all ranks continue even if the group fails meanwhile.
    pub(super) runs: bool,
    /// Arrivals of all ranks in all rounds. Round `k` is complete at `(k + 1) * world size`, because no rank is ahead.
    pub(super) arrivals: usize,
    pub(super) closed: usize,
}

impl Operation {
    pub(super) fn new(world_size: usize) -> Operation {
        let deposits = [vec![None; world_size], vec![None; world_size]];
        Operation { calls: vec![None; world_size], deposits, runs: false, arrivals: 0, closed: 0 }
    }
}
