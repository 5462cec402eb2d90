use crate::backend::{AskAll, RankShared};
use crate::diagnosis::Witness;
use crate::flight::Flight;
use crate::recorder::Recorder;
use crate::timeline::StepTimeline;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Shows what a rank and, where possible, all ranks of its world are doing, without communicating as a rank. May
/// outlive the communicator, and does not keep it in its group.
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

    /// World ranks that are held for inspection.
    pub fn held(&self) -> Vec<usize> {
        self.shared.holds.ranks()
    }

    /// The rank's flight recorder.
    pub fn recorder(&self) -> &Arc<Recorder> {
        &self.shared.recorder
    }

    /// Returns the rank's flight, with at most the last `records` operations and without a verdict.
    pub fn flight(&self, records: usize) -> Flight {
        self.shared.flight(self.backend, records)
    }

    /// Returns the timeline of optimizer step `step`, by default the last completed step; `None` if not recorded.
    pub fn timeline(&self, step: Option<u64>) -> Option<StepTimeline> {
        self.shared.recorder.timeline(self.rank(), &self.shared.node, step)
    }

    /// Returns the state of every rank, in rank order. Ranks that do not answer within `patience` are silent. `None` if
    /// this rank cannot ask: between processes, only rank 0 can.
    pub fn ask_all(&self, patience: Duration) -> Option<Vec<Witness>> {
        self.ask_all.as_ref().map(|ask| ask(patience))
    }
}

impl fmt::Debug for RankView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RankView").field("rank", &self.rank()).field("backend", &self.backend).finish()
    }
}
