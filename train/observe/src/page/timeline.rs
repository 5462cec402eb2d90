//! Where the timelines that are shown come from.

use std::path::Path;
use std::sync::Arc;

use kiln_collectives::StepTimeline;

/// The last whole step of every rank of the run in a folder that can be reached from here, or why there is none, for
/// people.
pub type TimelinesAt = Arc<dyn Fn(&Path) -> Result<Vec<StepTimeline>, String> + Send + Sync>;
