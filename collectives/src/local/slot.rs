//! The state of one operation while the ranks of its group take part in it.

use crate::buffer::Buffer;
use crate::call::Call;
use std::sync::Arc;

/// Buffers that ranks let each other read in one round of an operation, by rank.
pub(super) type Deposits = Vec<Option<Arc<Buffer>>>;

/// What becomes of an operation once all ranks have entered it. A decision never changes, so that all ranks
/// act alike whatever happens meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Decision {
    Run,
    Refuse,
}

/// One operation of a group.
///
/// It runs in rounds. In each round, every rank may deposit a buffer for the others to read, and no rank goes
/// on before all have arrived. A rank that arrives at a round has stopped reading the deposits of the round
/// before, so their owners may take them back.
pub(super) struct Slot {
    /// The call of each rank, once it has entered.
    pub(super) calls: Vec<Option<Call>>,
    /// Deposits of the first round (inputs) and of the second (partial results).
    pub(super) deposits: [Deposits; 2],
    pub(super) decision: Option<Decision>,
    /// Arrivals so far, over all ranks and rounds. No rank is ever a round ahead, so round `k` is complete
    /// when this reaches `(k + 1) * world size`.
    pub(super) arrivals: usize,
    /// Number of ranks that have left the operation.
    pub(super) closed: usize,
}

impl Slot {
    pub(super) fn new(world_size: usize) -> Slot {
        Slot {
            calls: vec![None; world_size],
            deposits: [vec![None; world_size], vec![None; world_size]],
            decision: None,
            arrivals: 0,
            closed: 0,
        }
    }

    /// The calls of the ranks that have entered.
    pub(super) fn known_calls(&self) -> Vec<Call> {
        self.calls.iter().flatten().cloned().collect()
    }
}
