//! A view of a world's ranks for observers.

use crate::backend::{AskAll, RankShared};
use crate::diagnosis::Witness;
use crate::flight::Flight;
use crate::recorder::Recorder;
use crate::timeline::StepTimeline;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Shows what a rank and, where possible, all ranks of its world are doing, without taking part in their
/// communication.
///
/// A view may outlive its communicator, and does not keep the communicator from leaving its group.
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

    /// Returns the rank in the world.
    pub fn rank(&self) -> usize {
        self.shared.world_rank
    }

    /// Returns the number of ranks in the world.
    pub fn world_size(&self) -> usize {
        self.shared.world_size
    }

    /// Returns the world ranks that are held for inspection.
    pub fn held(&self) -> Vec<usize> {
        self.shared.holds.ranks()
    }

    /// Returns the flight recorder of the rank.
    pub fn recorder(&self) -> &Arc<Recorder> {
        &self.shared.recorder
    }

    /// Returns the current contents of the rank's flight recorder, with at most its last `records` operations
    /// and without a verdict.
    pub fn flight(&self, records: usize) -> Flight {
        self.shared.flight(self.backend, records)
    }

    /// Returns the rank's timeline of optimizer step `step`, or by default of the last completed step. `None`
    /// if the step is unknown or its timeline is no longer kept.
    pub fn timeline(&self, step: Option<u64>) -> Option<StepTimeline> {
        self.shared.recorder.timeline(self.rank(), &self.shared.node, step)
    }

    /// Returns the current state of every rank of the world, in rank order. Ranks that do not answer within
    /// `patience` are reported as silent. Returns `None` if this rank cannot ask the others: between
    /// processes, only rank 0 can.
    pub fn ask_all(&self, patience: Duration) -> Option<Vec<Witness>> {
        self.ask_all.as_ref().map(|ask| ask(patience))
    }
}

impl fmt::Debug for RankView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RankView").field("rank", &self.rank()).field("backend", &self.backend).finish()
    }
}
