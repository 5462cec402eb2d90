//! The state of one operation while its ranks meet.

use super::group::Place;
use crate::buffer::Buffer;
use crate::call::Call;
use std::sync::Arc;

/// Buffers that ranks lend to each other for one round of an operation, by rank.
pub(super) type Deposits = Vec<Option<Arc<Buffer>>>;

/// What became of an operation once all ranks had entered it. Never changes again, so that
/// all ranks act alike whatever happens meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Run,
    Refuse,
}

/// One operation of a group.
///
/// It runs in rounds. In each, every rank may deposit a buffer for the others to read, and
/// no rank goes on before all have arrived. Arriving at a round means that the rank has
/// stopped reading the deposits of the round before, so their owners may take them back.
pub(super) struct Slot {
    /// What each rank called, once it has entered.
    pub(super) calls: Vec<Option<Call>>,
    /// Deposits of the first round (inputs) and the second (partial results).
    pub(super) deposits: [Deposits; 2],
    pub(super) verdict: Option<Verdict>,
    /// Places a split hands out, by old rank.
    pub(super) places: Vec<Option<Place>>,
    /// Arrivals so far, over all ranks and rounds. Since nobody is ever a round ahead, round
    /// `k` is complete when this reaches `(k + 1) * world size`.
    pub(super) arrivals: usize,
    /// Ranks that are through.
    pub(super) closed: usize,
}

impl Slot {
    pub(super) fn new(world_size: usize) -> Slot {
        Slot {
            calls: vec![None; world_size],
            deposits: [vec![None; world_size], vec![None; world_size]],
            verdict: None,
            places: (0..world_size).map(|_| None).collect(),
            arrivals: 0,
            closed: 0,
        }
    }

    /// The calls of all ranks, or of those that have entered.
    pub(super) fn known_calls(&self) -> Vec<Call> {
        self.calls.iter().flatten().cloned().collect()
    }
}
