//! A look at the ranks of a world from outside.

use crate::backend::{AskAll, RankShared};
use crate::diagnosis::Witness;
use crate::flight::Flight;
use crate::recorder::Recorder;
use crate::timeline::StepTimeline;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Sees what a rank is doing, and where that is possible what all ranks are doing, without taking part.
///
/// It may outlive the communicator that it is of, which leaves its group all the same.
#[derive(Clone)]
pub struct RankView {
    shared: Arc<RankShared>,
    backend: &'static str,
    ask_all: Option<AskAll>,
}

impl RankView {
    pub(crate) fn new(shared: Arc<RankShared>, backend: &'static str, ask_all: Option<AskAll>) -> RankView {
        RankView { shared, backend, ask_all }
    }

    /// The rank in the world.
    pub fn rank(&self) -> usize {
        self.shared.world_rank
    }

    /// Number of ranks in the world.
    pub fn world_size(&self) -> usize {
        self.shared.world_size
    }

    /// Which ranks of the world are held for somebody to look into them.
    pub fn held(&self) -> Vec<usize> {
        self.shared.holds.ranks()
    }

    /// The flight recorder of the rank.
    pub fn recorder(&self) -> &Arc<Recorder> {
        &self.shared.recorder
    }

    /// The contents of the rank's flight recorder right now, with its last `records` operations at most and
    /// without a verdict.
    pub fn flight(&self, records: usize) -> Flight {
        self.shared.flight(self.backend, records)
    }

    /// What the rank did in optimizer step `step`, or in the last one that has ended; `None` if that is not known,
    /// or not any more.
    pub fn timeline(&self, step: Option<u64>) -> Option<StepTimeline> {
        self.shared.recorder.timeline(self.rank(), &self.shared.node, step)
    }

    /// What is known of every rank of the world right now, in rank order. Ranks that do not answer within
    /// `patience` are silent. `None` if the others cannot be asked from here: processes are asked by rank 0.
    pub fn ask_all(&self, patience: Duration) -> Option<Vec<Witness>> {
        self.ask_all.as_ref().map(|ask| ask(patience))
    }
}

impl fmt::Debug for RankView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RankView").field("rank", &self.rank()).field("backend", &self.backend).finish()
    }
}
