//! The last step of a rank, as the page draws it.

use std::path::Path;
use std::sync::Arc;

use kiln_collectives::Record;

/// What a rank's own thread did for a while. Times count from the creation of its recorder, in seconds.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// Such as `data loading`, `forward`, `backward`, `optimizer`, `checkpoint`.
    pub activity: String,
    /// The module that it was in, such as `layers.3`; `None` outside of modules.
    pub unit: Option<String>,
    /// The collective that it waited for, by group and number; `None` if it did not wait.
    pub waits_for: Option<(String, u64)>,
    /// When it began.
    pub start: f64,
    /// When it ended.
    pub end: f64,
    /// Bytes that the rank held at the end; 0 where nobody counts them.
    pub bytes: u64,
}

/// One step of one rank, from its beginning to the beginning of the next one.
#[derive(Clone, Debug, PartialEq)]
pub struct StepTimeline {
    /// Rank in the world.
    pub rank: usize,
    /// Machine that the rank runs on.
    pub node: String,
    /// The optimizer step.
    pub step: u64,
    /// When it began, as in [`Span`].
    pub start: f64,
    /// When it ended.
    pub end: f64,
    /// When the recorder was made, in seconds on the machine's monotonic clock: aligns ranks of one machine.
    pub created: f64,
    /// What the rank's thread did, in order.
    pub spans: Vec<Span>,
    /// Its collectives that were issued in the step, in order.
    pub records: Vec<Record>,
}

/// The last whole step of every rank of the run in a folder that can be reached from here, or why there is none, for
/// people.
pub type TimelinesAt = Arc<dyn Fn(&Path) -> Result<Vec<StepTimeline>, String> + Send + Sync>;
