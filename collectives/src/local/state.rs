//! The state that the ranks of a group lock and wait on.

use crate::buffer::Buffer;
use crate::call::Call;
use crate::error::{Abort, Cause};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The state that the ranks of a group share.
pub(super) struct State {
    /// Operations that at least one rank has entered and not all have left; at most two.
    pub(super) operations: BTreeMap<u64, Operation>,
    /// Number of operations that each rank has issued.
    pub(super) issued: Vec<u64>,
    /// Reason why no further operation can start.
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

/// The buffers that ranks let each other read in one round of an operation, by rank.
pub(super) type Deposits = Vec<Option<Arc<Buffer>>>;

/// A running operation of a group.
///
/// An operation runs in rounds. In each round, every rank may deposit a buffer for the others to read, and no
/// rank continues before all have arrived. A rank that arrives at a round has stopped reading the deposits of
/// the previous round, so their owners may take them back.
pub(super) struct Operation {
    /// The call of each rank; `None` until the rank has entered.
    pub(super) calls: Vec<Option<Call>>,
    /// Deposits of the first round (inputs) and of the second round (partial results).
    pub(super) deposits: [Deposits; 2],
    /// True once all ranks have entered and their calls agree. Never reset, so that all ranks continue even
    /// if the group fails in the meantime.
    pub(super) runs: bool,
    /// Arrivals so far, over all ranks and rounds. No rank is ever a round ahead, so round `k` is complete
    /// when the number reaches `(k + 1) * world size`.
    pub(super) arrivals: usize,
    /// Number of ranks that have left the operation.
    pub(super) closed: usize,
}

impl Operation {
    pub(super) fn new(world_size: usize) -> Operation {
        let deposits = [vec![None; world_size], vec![None; world_size]];
        Operation { calls: vec![None; world_size], deposits, runs: false, arrivals: 0, closed: 0 }
    }
}
