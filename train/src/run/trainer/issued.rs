//! A step that is under way.

use std::time::{Duration, Instant};

use kiln_collectives::ActivityTime;
use kiln_shard::Update;

use crate::run::RecordedStep;
use crate::values::Values;

/// A step that has been given to the device. Of a GPU, nothing of it is known yet.
pub(super) struct Issued {
    pub(super) step: u64,
    pub(super) update: Update,
    pub(super) lr: f64,
    pub(super) start: Instant,
    /// How long ranks had been held until then.
    pub(super) held: Duration,
    /// Where the time of the rank had gone until then.
    pub(super) times: Vec<ActivityTime>,
    pub(super) peak_bytes: u64,
    /// Tokens trained on up to here.
    pub(super) tokens: u64,
    /// What goes into the log besides; `None` if the step is not logged.
    pub(super) log: Option<StepLog>,
}

/// What is written of a step that is logged, besides what every step has.
pub(super) struct StepLog {
    /// What the layers of this rank have recorded.
    pub(super) recorded: RecordedStep,
    /// Whether the layers of any rank have recorded anything.
    pub(super) any_recorded: bool,
    /// The norm of the gradient by module, if it is wanted.
    pub(super) grad_norms: Values,
}
